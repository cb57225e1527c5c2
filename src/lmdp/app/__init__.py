"""The command line and what stands behind it: one flow from a configuration to a run folder with its report.

cli          the commands: parse, call the pipeline, print where the result is
arguments    the words of the command line, and its help
config       what a run is made of: named values, checked
recipes/     one small TOML file per experiment
pipeline     the flow as code: risk, train, audit, compare
account      what was spent before a run, and whether what it publishes is public
training     one model trained in a run folder, to be stopped and continued at any step
reports      run folders read back: numbers to compare, and the story that a report tells
bounds       how much epsilon a run's training spends, at least
runs/        what a training leaves on disk
progress     what a user sees while waiting, and how to stop
tensorboard  event files, where the extra is installed
bench/       speed and memory of a private step against others
"""
