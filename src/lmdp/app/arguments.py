"""The words of the command line: which commands there are, what each takes, and what a configuration makes of it.

Help is read out of the tables (methods, weight sources, accountants, data readers, configuration keys), without torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmdp.app.config import SETTINGS, Config
from lmdp.app.nearest import Parser
from lmdp.app.recipes import recipe, recipe_names
from lmdp.app.reproduce.grid import PARTS
from lmdp.app.reproduce.paper import EXPERIMENTS
from lmdp.app.reproduce.scales import SCALES
from lmdp.app.settings import METAVARS, meet_pieces
from lmdp.data.readers import GENERAL, READERS
from lmdp.methods import METHODS

DESCRIPTION = """\
Train models on private data that are then served as embeddings, without leaking who was in the data.

  lmdp demo       see all of it on data that installs with the package: about two minutes
  lmdp risk       measure on public data which layers of an architecture give membership away
  lmdp plan       which noise and which batch for so many examples, and what to expect
  lmdp train      train a model with differential privacy
  lmdp audit      attack a trained model, layer by layer
  lmdp compare    train and audit several methods at the same epsilon
  lmdp embed      write what a layer of a finished run makes of data
  lmdp export     write what may be published of a run, for sentence-transformers or as safetensors
  lmdp doctor     say what is installed here, and test in a minute that norms and noise are right
  lmdp tune       find settings on public data: accurate ones whose canaries leak least
  lmdp reproduce  measure the paper's tables and figures again, with a verdict on each claim
  lmdp bench      measure speed and memory of a step against non-private SGD and Opacus

lmdp COMMAND --help has its options and examples.
"""
EXIT_CODES = """\
exit codes: 0 done, 2 wrong input or an environment error (one line says which), 130 interrupted
"""
DEMO_METHODS, COMPARE_METHODS = "sgd,dpsgd,lm", "dpsgd,autos,psac,lm"
RISK_KEYS = (
    *("model", "activation", "weight_standardisation", "task", "lora", "tune", "init", "freeze", "device", "layers"),
    *("data", "shadow", "public", "size", "channels", "tokenizer", "max_length"),
    *("shadow_models", "shadow_epochs", "shadow_enough", "protocol", "seed"),
)
COMPARE_KEYS = tuple(key for key in SETTINGS if key not in ("method",))
TRAIN_KEYS = tuple(key for key in SETTINGS if not key.startswith("shadow_") and key != "protocol")
TUNE_KEYS = (
    *("model", "activation", "weight_standardisation", "layers", "shadow", "size", "channels", "classes"),
    *("epsilon", "delta", "sample_rate", "batch_size", "optimizer", "schedule", "momentum"),
    *("shadow_models", "shadow_epochs", "shadow_enough"),
)
TUNED = {
    "learning_rate": ("--learning-rates", "0.5,0.1,0.25,1,2"),
    "clip_norm": ("--clip-norms", "1,0.5,2"),
    "epochs": ("--epochs", "20,10,40"),
    "emphasis": ("--emphases", "1,0,3,5"),
}
"""What `lmdp tune` varies, in this order, by which option and over which values: the first until it is varied."""
PLAN_KEYS = (
    *("method", "epsilon", "delta", "accountant", "epochs", "sample_rate", "batch_size", "optimizer", "momentum"),
    *("clip_norm", "unit_clip"),
)
TRAINING = ("train", "compare", "demo")
"""Commands that train what the configuration says."""
AVERAGED = "take the moving average of the weights, which a run with --ema keeps"
SAME_THING = ("sample_rate", "batch_size")
"""Two keys for one thing: on the command line either overrides what a recipe says of the other."""


GROUPS = {
    "model": "model",
    "data": "data",
    "method": "privacy",
    "epochs": "training",
    "shadow_models": "risk on shadow data",
}
"""With which setting a group of options begins, in the order of the configuration."""
EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": ("lmdp demo", "lmdp demo --methods dpsgd,lm --epsilon 2 --out runs/demo-2"),
    "risk": (
        "lmdp risk --model s-cnn --shadow fashion-mnist --data mnist --out risk.json",
        "lmdp risk --model my_models:make_net --shadow folder:public --size 32 --channels 3 --out risk.json",
    ),
    "train": (
        "lmdp train --model resnet18 --data folder:photos --size 32 --channels 3 --classes cat,dog \\\n"
        "             --risk risk.json --epsilon 8 --delta 1e-6 --out runs/photos",
        "lmdp train --model tiny-encoder --tokenizer words --data jsonl:letters.jsonl --classes ham,spam \\\n"
        "             --method dpsgd --epsilon 8 --delta 1e-5 --out runs/letters",
        "lmdp train --recipe mnist --method dpsgd --out runs/mnist",
        "lmdp train --out runs/mnist --resume",
    ),
    "plan": ("lmdp plan --examples 54000 --epsilon 3", "lmdp plan --examples 1200 --epsilon 8 --batch-size 12"),
    "audit": ("lmdp audit runs/photos", "lmdp audit runs/photos --epsilon --runs 1000", "lmdp audit embeddings.npz"),
    "compare": ("lmdp compare --recipe mnist --methods dpsgd,autos,psac,lm --out runs/mnist",),
    "embed": (
        "lmdp embed runs/photos --data folder:photos --names --out vectors.npz",
        "lmdp embed runs/letters --data jsonl:more.jsonl --layer blocks.1 --out letters.npz",
    ),
    "export": ("lmdp export runs/letters --to served", "lmdp export runs/photos --form safetensors --to release"),
    "tune": ("lmdp tune --model s-cnn --shadow fashion-mnist --epsilon 8 --sample-rate 0.05 --out runs/tuned",),
    "reproduce": (
        "lmdp reproduce table2 --scale smoke --out runs/smoke",
        "lmdp reproduce all --scale cpu --data-folder data --out runs/paper",
    ),
    "bench": ("lmdp bench --models d-cnn --steps 9", "lmdp bench --growth --out bench"),
    "doctor": ("lmdp doctor", "lmdp doctor --quick --json"),
}


def parser() -> argparse.ArgumentParser:
    """What it parses carries the name of the command as `command`."""
    top = Parser(
        prog="lmdp",
        usage="lmdp [-h] [--version] COMMAND ...",
        description=DESCRIPTION,
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = top.add_subparsers(
        prog="lmdp", dest="command", metavar="COMMAND", required=True, parser_class=Parser, help=argparse.SUPPRESS
    )

    demo = _command(commands, "demo", "the whole flow on data that installs with the package")
    demo.add_argument("--out", type=_place, help="folder for the result (default: runs/demo, or the next that is free)")
    demo.add_argument("--resume", action="store_true", help="continue the demo in --out")
    demo.add_argument("--text", action="store_true", help="the same on texts: a small transformer, documentation")
    demo.add_argument("--methods", default=DEMO_METHODS, help="comma-separated (default: %(default)s)")
    _options(demo, COMPARE_KEYS)

    risk = _command(commands, "risk", "measure on public data which layers give membership away")
    risk.add_argument("--out", type=_place, required=True, metavar="FILE", help="where to write the risk profile")
    risk.add_argument("--recipe", help=f"start from a recipe: {', '.join(recipe_names())}, or a .toml file")
    _options(risk, RISK_KEYS)

    train = _command(commands, "train", "train a model with differential privacy")
    train.add_argument("--out", type=_place, required=True, metavar="DIR", help="run folder; must not hold a run yet")
    train.add_argument("--resume", action="store_true", help="continue the run in DIR")
    train.add_argument("--recipe", help=f"start from a recipe: {', '.join(recipe_names())}, or a .toml file")
    _options(train, TRAIN_KEYS)

    plan = _command(commands, "plan", "which noise, batch and learning rate, and what to expect; touches no data")
    plan.add_argument("--examples", type=int, required=True, metavar="N", help="how many private examples train")
    plan.add_argument("--parameters", type=int, metavar="D", help="of the model (default: 26,010, S-CNN on 28x28)")
    plan.add_argument("--recipe", help=f"start from a recipe: {', '.join(recipe_names())}, or a .toml file")
    _options(plan, PLAN_KEYS)

    audit = _command(commands, "audit", "attack a trained model, layer by layer (computed on private data)")
    audit.add_argument(
        "target",
        metavar="DIR",
        type=Path,
        help="run folder, or an .npz of embeddings (member, nonmember; better with member_inputs, nonmember_inputs)",
    )
    audit.add_argument("--run", metavar="DIR", type=Path, help="of embeddings by lmdp embed: where their run is now")
    audit.add_argument("--members", metavar="SPEC", help="examples that were trained on (default: the run's own)")
    audit.add_argument(
        "--changed-data", action="store_true", help="audit those examples of the run that are left, and say so"
    )
    audit.add_argument(
        "--references",
        type=int,
        default=0,
        metavar="K",
        help="train the run's configuration K times again, each on a random half of the examples that are audited, and "
        "judge every example's scores by those of these models; continues where it was broken off (default: 0)",
    )
    audit.add_argument(
        "--white-box", action="store_true", help="also attack all layers together, and with each example's gradients"
    )
    audit.add_argument("--epsilon", action="store_true", help="also bound the epsilon of the training from below")
    audit.add_argument(
        "--runs", type=int, default=1000, help="trainings per bound by repetition (default: %(default)s)"
    )
    audit.add_argument(
        "--nonmembers",
        metavar="SPEC",
        help="examples that were not (default: those that the run kept out, else its test data)",
    )

    compare = _command(commands, "compare", "train and audit several methods at the same epsilon")
    compare.add_argument("--recipe", required=True, help=f"{', '.join(recipe_names())}, or a .toml file")
    compare.add_argument("--methods", default=COMPARE_METHODS, help="comma-separated (default: %(default)s)")
    compare.add_argument("--out", type=_place, required=True, metavar="DIR", help="folder for runs and report")
    compare.add_argument("--resume", action="store_true", help="continue the comparison in DIR")
    _options(compare, COMPARE_KEYS)

    embed = _command(commands, "embed", "write what a layer of a finished run makes of data")
    embed.add_argument(
        "target", metavar="DIR", type=Path, help="run folder, or what lmdp export made of one as safetensors"
    )
    embed.add_argument("--layer", metavar="NAME", help="of the run's layers (default: the last before the head)")
    embed.add_argument("--data", metavar="SPEC", help="what to embed (default: the run's own data)")
    embed.add_argument("--out", type=_place, required=True, metavar="FILE.npz", help="where to write the embeddings")
    embed.add_argument(
        "--pooling", default="mean", choices=("mean", "cls", "last"), help="of texts (default: %(default)s)"
    )
    embed.add_argument("--names", action="store_true", help="write the path of each image, or the line of each text")
    embed.add_argument("--average", action="store_true", help=AVERAGED)
    embed.add_argument("--inputs", action="store_true", help="write the inputs too: a control for an audit of the file")

    export = _command(commands, "export", "write what may be published of a run, in a form that others read")
    export.add_argument("target", metavar="DIR", type=Path, help="run folder")
    export.add_argument("--to", "--out", type=_place, required=True, metavar="FOLDER", help="a new folder")
    export.add_argument("--average", action="store_true", help=AVERAGED)
    export.add_argument(
        "--form",
        choices=("sentence-transformers", "safetensors"),
        help="default: sentence-transformers of a model of transformers for texts, else safetensors",
    )

    reproduce = _command(commands, "reproduce", "the paper's tables and figures beside its numbers")
    reproduce.add_argument("what", metavar="WHAT", help=f"{', '.join(PARTS)}, or all")
    reproduce.add_argument(
        "--out", type=_place, required=True, metavar="DIR", help="for cells and report; goes on there"
    )
    reproduce.add_argument("--scale", default="cpu", help=f"{', '.join(SCALES)} (default: %(default)s)")
    reproduce.add_argument("--seeds", type=int, metavar="N", help="paired seeds (default: the scale's)")
    reproduce.add_argument("--experiments", default="", help=f"comma-separated, of {', '.join(EXPERIMENTS)}")
    reproduce.add_argument("--data-folder", type=Path, metavar="FOLDER", help="where mnist.npz, cifar10.npz, … are")
    reproduce.add_argument("--private", metavar="SPEC", help="private data of the one experiment that is chosen")
    reproduce.add_argument("--shadow", metavar="SPEC", help="its shadow data")
    reproduce.add_argument("--jobs", type=int, metavar="N", help="cells at a time (default: one for each core)")
    reproduce.add_argument("--device", default="cpu", help="where cells train: cpu, cuda (default: %(default)s)")
    reproduce.add_argument("--draw", action="store_true", help="measure nothing; judge and draw what is there")

    tune = _command(commands, "tune", "settings on the frontier of leakage against accuracy, found on public data")
    tune.add_argument("--out", type=_place, required=True, metavar="DIR", help="for recipe and report; goes on there")
    tune.add_argument("--methods", default="dpsgd,autos,lm", help="comma-separated (default: %(default)s)")
    for key, (option, tried) in TUNED.items():
        about = f"to be tried: {SETTINGS[key].help} (default: %(default)s)"
        tune.add_argument(option, dest=f"tried_{key}", default=tried, metavar="X,X,…", help=about)
    tune.add_argument("--seeds", type=int, default=2, metavar="N", help="trainings of every setting (default: 2)")
    tune.add_argument("--tolerance", type=float, default=0.01, help="of accuracy, given up for less leakage")
    tune.add_argument("--examples", type=int, default=6000, metavar="N", help="of either half, at most (0: all)")
    tune.add_argument("--jobs", type=int, metavar="N", help="cells at a time (default: one for each core)")
    _options(tune, TUNE_KEYS)

    bench = _command(commands, "bench", "speed and memory against non-private SGD and Opacus, in one run")
    every = "s-cnn, d-cnn, resnet18, vgg16, transformer, encoder24, minilm, siamese, lora, gpt2, lstm"
    bench.add_argument("--models", help=f"comma-separated, of {every} (default: all)")
    bench.add_argument("--steps", type=int, default=9, help="steps timed of every contender (default: %(default)s)")
    bench.add_argument("--only", default="", help="comma-separated parts of contenders' names; SGD is always in")
    bench.add_argument("--no-memory", action="store_true", help="leave out peak memory, which takes a process each")
    bench.add_argument("--channels-last", action="store_true", help="measure images in channels_last, SGD too")
    bench.add_argument("--batch", type=int, metavar="N", help="of --processes: batches of so many, shared by all")
    other = bench.add_mutually_exclusive_group()
    other.add_argument("--growth", action="store_true", help="larger batches, models, sequences; the rest of the loop")
    other.add_argument(
        "--processes", type=int, metavar="N", help="a step by 1, 2, 4 … N processes, beside DistributedDataParallel"
    )
    other.add_argument(
        "--plan", action="store_true", help="print which rule every module uses (default: d-cnn, transformer)"
    )
    bench.add_argument("--out", type=_place, metavar="DIR", help="folder for bench.json and bench.svg, or other .json")

    doctor = _command(commands, "doctor", "what is installed here, and a test of exactness and noise: a minute")
    doctor.add_argument("--quick", action="store_true", help="leave the test out")
    return top


def config_of(arguments: argparse.Namespace, recipe_name: str | None) -> Config:
    """The recipe, overridden by the command line."""
    meet_pieces(vars(arguments).get("key_model"))
    values, given = recipe(recipe_name) if recipe_name else {}, {}
    for name, text in vars(arguments).items():
        key = name.removeprefix("key_")
        if name.startswith("key_") and text is not None:
            given[key] = SETTINGS[key].parse(f"--{key.replace('_', '-')}", text)
    for one, other in (SAME_THING, SAME_THING[::-1]):
        if given.get(one) is not None:
            values.pop(other, None)
    if arguments.command in TRAINING:
        given = _rates_as_meant(given, _trained(arguments, {**values, **given}))
    return Config.of({**values, **given}, recipe_name or "configuration").anchored()


def _trained(arguments: argparse.Namespace, values: dict[str, Any]) -> list[str]:
    """The methods that a command trains."""
    chosen = values.get("method", Config.__dataclass_fields__["method"].default)
    return methods_of(arguments.methods if "methods" in arguments else str(chosen))


def _rates_as_meant(given: dict[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """A learning rate on the command line is that of a method that is trained, or it is refused; never left unused."""
    private = any(METHODS[name].private for name in methods)
    plain = not all(METHODS[name].private for name in methods)
    if given.get("sgd_learning_rate") is not None and not plain:
        raise ValueError(
            f"--sgd-learning-rate is the step size of method sgd, and {', '.join(methods)} is trained: give "
            "--learning-rate instead"
        )
    if given.get("learning_rate") is None or private or not plain:
        return given
    if given.get("sgd_learning_rate") is not None:
        raise ValueError(
            "--learning-rate and --sgd-learning-rate are both given, and method sgd has one: leave one out"
        )
    return {**{k: v for k, v in given.items() if k != "learning_rate"}, "sgd_learning_rate": given["learning_rate"]}


def _place(text: str) -> Path:
    """Where something is written to; the empty text would be the current folder, which nobody means."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} names no folder or file")
    return Path(text)


def words_of(text: str) -> list[str]:
    """What is separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def methods_of(text: str) -> list[str]:
    """Names of methods, each once."""
    methods = words_of(text)
    unknown = [name for name in methods if name not in METHODS]
    if unknown or not methods or len(set(methods)) < len(methods):
        raise ValueError(
            f"--methods is {text!r}; it must be a comma-separated choice of {', '.join(METHODS)}, each once"
        )
    return methods


def _command(commands: Any, name: str, help: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog=_examples(name) + _epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument("--quiet", action="store_true", help="print the result only")
    command.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")
    return command


def _options(command: argparse.ArgumentParser, keys: Sequence[str]) -> None:
    """One option per configuration key; what is not given comes from the recipe, or is the default."""
    group = command.add_argument_group("configuration (each overrides the recipe)")
    for key in SETTINGS:
        if key in GROUPS:
            group = command.add_argument_group(GROUPS[key])
        if key not in keys:
            continue
        setting = SETTINGS[key]
        default = Config.__dataclass_fields__[key].default
        allowed = f": {', '.join(setting.choices)}" if setting.choices else ""
        shown = "" if default is None else f" (default: {str(default).lower() if setting.kind is bool else default})"
        given: dict[str, Any] = {"nargs": "?", "const": "true"} if setting.kind is bool else {}
        group.add_argument(
            f"--{key.replace('_', '-')}",
            dest=f"key_{key}",
            metavar=METAVARS.get(key, {str: "NAME", int: "N", float: "X", bool: "true"}[setting.kind]),
            **given,
            help=f"{setting.help}{allowed}{shown}".replace("%", "%%"),
        )


def _examples(command: str) -> str:
    lines = EXAMPLES.get(command, ())
    return "".join(["examples:\n", *(f"  {line}\n" for line in lines), "\n"]) if lines else ""


def _epilog() -> str:
    """Every reader with its options, and the exit codes."""
    width = max(len(reader.spec) for reader in READERS.values())
    lines = ["data SPECs (options follow a question mark; what is downloaded is kept in the cache folder):"]
    for reader in READERS.values():
        options = f" ({', '.join(f'{option}=' for option in reader.options)})" if reader.options else ""
        lines.append(f"  {reader.spec:{width}}  {reader.help}{options}")
    lines.append(f"  {'all of them':{width}}  {', '.join(f'{option}=' for option in GENERAL)}")
    return "\n".join([*lines, "", EXIT_CODES])


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from lmdp import __version__

        parser.exit(0, f"lmdp {__version__}\n")
