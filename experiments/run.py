"""`python -m experiments.run NAME`: run an experiment, or go on with a run that was stopped."""

from __future__ import annotations

import hashlib
import signal
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from adaptspec.cli import EXIT_INTERRUPTED, options
from adaptspec.cli.common import check_at_least, console, show
from adaptspec.cli.prompts import Prompt, built_in_prompts, read_prompts, select_prompts
from adaptspec.pretrained import read_card
from experiments.cluster import ray_cluster
from experiments.expert_folder import ExpertFolder
from experiments.progress import rich_table, watcher
from experiments.runner import Summary, run_sweep
from experiments.store import RunFolder, frame_of, latest_run
from experiments.sweeps import Configuration, Experiment, Sweep, experiment_names, find_experiment, load_work
from experiments.tasks import Settings

RUNS = Path("runs")
EXIT_PROBLEM = 1
EXIT_BAD_INPUT = 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of: {', '.join(experiment_names())}.")],
    quick: Annotated[bool, typer.Option("--quick", help="The small sweep, minutes on two cores.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with --out, or with the latest run.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The run's folder. [default: a new one in runs/]")
    ] = None,
    address: Annotated[
        str | None, typer.Option("--address", metavar="ADDR", help="Join a Ray cluster: 'auto' or HOST:PORT.")
    ] = None,
    cpus_per_task: Annotated[
        float | None, typer.Option("--cpus-per-task", metavar="C", help="Of configurations that run the model.")
    ] = None,
    gpus_per_task: Annotated[
        float | None, typer.Option("--gpus-per-task", metavar="G", help="Of configurations that run the model.")
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", metavar="N", help="Seeds per configuration.")] = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="TEXT", help="Only ids that hold it, and what they need.")
    ] = None,
    model: options.Model = "embedded",
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    prompts: Annotated[
        list[Path] | None, typer.Option("--prompts", metavar="FILE", help="Prompts; may be repeated.")
    ] = None,
    per_category: Annotated[
        int | None, typer.Option("--per-category", metavar="N", help="At most N prompts of each domain.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", help="At most N prompts.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option("--max-new-tokens", metavar="N", help="Longest answer.")] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Replay this trace instead of recording one.")
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option("--weights", metavar="NAME=PATH", help="Where a drafter's weights are; may be repeated."),
    ] = None,
    experts: Annotated[
        Path | None,
        typer.Option(
            "--experts", metavar="FILE", help="Texts for the stores of domain experts. [default: prompts not asked]"
        ),
    ] = None,
    heads: Annotated[
        Path | None,
        typer.Option("--heads", metavar="DIR", help="Heads of domain experts, of 'python -m experiments.experts'."),
    ] = None,
    published: Annotated[
        list[Path] | None,
        typer.Option("--published", metavar="FILE", help="CSV of published figures; may be repeated."),
    ] = None,
    retries: Annotated[int, typer.Option("--retries", metavar="N", help="How often a dead worker is replaced.")] = 2,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Ray's dashboard, which opens a port.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Run an experiment. Finished configurations are kept whatever happens; --resume does the rest."""
    check_at_least(1, seeds=seeds, per_category=per_category, limit=limit, max_new_tokens=max_new_tokens)
    check_at_least(0, retries=retries)
    for option, value in (("cpus-per-task", cpus_per_task), ("gpus-per-task", gpus_per_task)):
        if value is not None and not value >= 0.0:
            raise ValueError(f"{option} must be >= 0, got {value}")
    experiment = find_experiment(name)
    sweep = experiment.sweep(quick=quick)
    everything = _prompts(prompts)
    chosen = select_prompts(
        everything, limit=limit or sweep.limit, per_category=per_category or sweep.per_category, seed=0
    )
    settings = Settings(
        model=model,
        dtype=dtype,
        device=device,
        prompts=tuple(chosen),
        max_new_tokens=max_new_tokens or sweep.max_new_tokens,
        weights=_pairs(weights or []),
        experts=_experts(everything if experts is None else read_prompts(experts), asked=chosen),
        heads={} if heads is None else _heads(ExpertFolder(heads), asked=chosen),
        trace=None if trace is None else trace.read_bytes(),
        small=quick,
    )
    configurations = choose(sweep, seeds=seeds, only=only, cpus=cpus_per_task, gpus=gpus_per_task)
    argv = ["python", "-m", "experiments.run", *sys.argv[1:]]
    session = {"argv": argv, "begun": datetime.now().astimezone().isoformat(timespec="seconds")}
    asked = {"experiment": name, "quick": quick, **described(settings)}
    folder = _folder(name, out, resume=resume, asked=asked, session=session)
    for path in published or []:
        (folder.path / "published").mkdir(exist_ok=True)
        (folder.path / "published" / path.name).write_bytes(path.read_bytes())

    def partial() -> Any:
        return experiment.analysis.score(frame_of(folder.results()))

    with folder.locked(), ray_cluster(address, dashboard=dashboard) as ray, watcher(partial, quiet=quiet) as watching:
        try:
            summary = run_sweep(
                ray,
                configurations,
                folder=folder,
                settings=settings,
                argv=argv,
                watcher=watching,
                retries=retries,
            )
        except OSError as error:
            kept = len(folder.finished())
            raise OSError(
                f"a result could not be written to {folder.path} ({error}); {kept} finished configurations are kept: "
                f"make room, then go on with --resume --out {folder.path}"
            ) from error
    conclude(experiment, folder, summary)


def conclude(experiment: Experiment, folder: RunFolder, summary: Summary) -> None:
    """The final table, what is missing, and the exit status."""
    table = experiment.analysis.score(frame_of(folder.results()))
    show(console(), rich_table(table, title=f"{experiment.name}: {folder.path}", most=200))
    for kind, found in (("not available", summary.unavailable), ("failed", summary.failed)):
        for name, reason in found.items():
            typer.echo(f"experiments: {name}: {kind}: {reason}", err=True)
    typer.echo(f"experiments: pictures and tables: python -m experiments.report {folder.path}", err=True)
    if summary.interrupted:
        typer.echo(f"experiments: interrupted; go on with --resume --out {folder.path}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)
    if summary.failed:
        raise typer.Exit(EXIT_PROBLEM)


def choose(
    sweep: Sweep, *, seeds: int | None, only: str | None, cpus: float | None, gpus: float | None
) -> tuple[Configuration, ...]:
    """The configurations to run, with what each of them occupies.

    Raises:
        ValueError: `only` leaves nothing.
    """
    everything = sweep.configurations(seeds)
    if only is not None:
        wanted = {c.id for c in everything if only in c.id}
        if not wanted:
            raise ValueError(f"only must be part of an id like {everything[-1].id!r}, got {only!r}")
        for configuration in reversed(everything):  # those that are needed stand before those that need them
            if configuration.id in wanted:
                wanted.update(configuration.needs)
        everything = tuple(c for c in everything if c.id in wanted)
    changed = {key: value for key, value in (("cpus", cpus), ("gpus", gpus)) if value is not None}
    return tuple(replace(c, **changed) if isinstance(load_work(c.work), type) else c for c in everything)


def described(settings: Settings) -> dict[str, Any]:
    """What of the settings makes a run another one; contents by their digest."""
    prompts = "\n".join(f"{p.id}\t{p.domain}\t{p.turns}" for p in settings.prompts)
    experts = "\n".join(f"{domain}\t{list(texts)}" for domain, texts in sorted(settings.experts.items()))
    return {
        "model": settings.model,
        "dtype": settings.dtype,
        "max_new_tokens": settings.max_new_tokens,
        "prompts": {"count": len(settings.prompts), "sha256": _digest(prompts.encode())},
        "experts": _digest(experts.encode()) if experts else None,
        "heads": {domain: read_card(path)["sha256"] for domain, path in sorted(settings.heads.items())} or None,
        "trace": None if settings.trace is None else _digest(settings.trace),
        "weights": dict(settings.weights),
    }


def _folder(name: str, out: Path | None, *, resume: bool, asked: dict[str, Any], session: dict[str, Any]) -> RunFolder:
    if not resume:
        path = out or RUNS / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
        return RunFolder.create(path, {**asked, "sessions": [session]})
    folder = RunFolder.open(out or latest_run(RUNS, name))
    before = folder.manifest()
    for field, value in asked.items():
        if before.get(field) != value:
            raise ValueError(f"{field} must be {before.get(field)!r} as in the run to resume, got {value!r}")
    folder.add_session(session)
    return folder


def _prompts(paths: list[Path] | None) -> list[Prompt]:
    if not paths:
        return built_in_prompts()
    found = [prompt for path in paths for prompt in read_prompts(path)]
    ids = [str(prompt.id) for prompt in found]
    if len(set(ids)) < len(ids):
        raise ValueError(f"ids of prompts must differ over all files, got {max(ids, key=ids.count)!r} twice")
    return found


def _experts(prompts: list[Prompt], *, asked: list[Prompt]) -> dict[str, list[str]]:
    """Texts by domain for the stores of experts: what is not asked."""
    taken = {turn for prompt in asked for turn in prompt.turns}
    texts: dict[str, list[str]] = {}
    for prompt in prompts:
        if not taken.intersection(prompt.turns):
            texts.setdefault(prompt.domain, []).append("\n\n".join(prompt.turns))
    return texts


def _heads(folder: ExpertFolder, *, asked: list[Prompt]) -> dict[str, str]:
    """Weights by domain of heads that know none of the prompts.

    Raises:
        ValueError: no domain is finished, or prompts that a head was trained on are asked.
    """
    found = folder.heads()
    if not found:
        raise ValueError(f"{folder.path} holds no finished head yet; go on with python -m experiments.experts")
    if known := folder.learnt(asked):
        raise ValueError(
            f"heads in {folder.path} were trained on {len(known)} of the {len(asked)} prompts that are asked, like "
            f"{known[0].id!r}; ask others by --prompts, or train on others"
        )
    return found


def _pairs(values: list[str]) -> dict[str, str]:
    pairs = {}
    for value in values:
        key, equals, path = value.partition("=")
        if not (key and equals and path):
            raise ValueError(f"weights must be NAME=PATH, got {value!r}")
        pairs[key] = path
    return pairs


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def run_app(command: typer.Typer) -> None:
    """A command of this package; what goes wrong is one line on stderr."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # finished results are kept then as well
    try:
        command(standalone_mode=True)
    except (ValueError, FileNotFoundError, FileExistsError, ImportError) as error:
        typer.echo(f"experiments: {error}", err=True)
        sys.exit(EXIT_BAD_INPUT)
    except (OSError, RuntimeError) as error:
        typer.echo(f"experiments: {error}", err=True)
        sys.exit(EXIT_PROBLEM)


if __name__ == "__main__":
    run_app(app)
