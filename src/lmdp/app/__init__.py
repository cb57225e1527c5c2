"""The command line and what stands behind it: one flow from a configuration to a run folder with its report.

cli          the commands: parse, call the pipeline, print where the result is
faults       what is said of an error
arguments    the words of the command line, and its help
nearest      what is wrong with a command line, and what was perhaps meant
config       what a run is made of: named values, checked
settings     what one value may be
rules        which values go together
recipes/     one small TOML file per experiment
beforehand   what can be refused before data are read, and seen of a trained model
planning     which noise, batch and learning rate suit so many examples and an epsilon
pipeline     the flow as code: risk, train, audit
comparison   several methods on the same data: risk once, each trained and audited
canaries     canaries in the data of a run
account      what was spent before a run, and whether what it publishes is public
chosen       an audit of examples that somebody chose, kept beside the run's own
network      the model of a run: built, begun with given weights, tried out
staged       what a first stage in which nothing is learnt makes of the examples, computed once
parts        in how many parts a batch is handed out, where nobody says
training     one model trained in a run folder, to be stopped and continued at any step
launched     what torchrun has told this process
together     several processes, of which one writes, and the others do what it tells them
shares       pieces of work that several processes share
descent      the optimizer of a run, and its learning rate over the steps
reports      run folders read back: numbers to compare, and the story that a report tells
references   a run's training again, on random halves of the examples that are audited
bounds       how much epsilon a run's training spends, at least
runs/        what a training leaves on disk
serving      a finished run, used: loaded, asked for embeddings, exported
publishing   what an export says of its privacy, and that it names no place of this machine
embedding    embeddings of data in a file, and such a file audited
progress     what a user sees while waiting, and how to stop
doctor       what is installed, and a test of exactness and noise
tensorboard  event files, where the extra is installed
bench/       speed and memory of a private step against others
cells/       experiments as grids of cells, each measured once and kept
tune/        settings on the frontier of leakage against accuracy, found on public data
reproduce/   the paper's tables and figures, measured again, with verdicts
"""
