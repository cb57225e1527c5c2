"""`python benchmarks/step_time.py --help`: the bench of `lmdp.bench`, from the command line."""

from lmdp.bench import main

if __name__ == "__main__":
    main()
