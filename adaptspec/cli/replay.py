"""`adaptspec replay`: play strategies on a recorded trace, against the best plays in hindsight."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adaptspec.cli import EXIT_INTERRUPTED, options

if TYPE_CHECKING:
    from adaptspec.control.cost_worlds import Costs
    from adaptspec.control.trace import Trace
    from adaptspec.types import Arm

BUDGETS = (4, 8, 16, 32, 64)
"""By default, as far as they were recorded."""


def replay(
    context: typer.Context,
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace of 'adaptspec trace'.")],
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategies",
            metavar="NAMES",
            help="Separated by commas: names, fixed:ARM like fixed:suffix@16, or 'all'. [default: the main ones]",
        ),
    ] = None,
    drafters: Annotated[
        list[str] | None, typer.Option("--drafters", metavar="NAMES", help="Only these of the recorded drafters.")
    ] = None,
    budgets: Annotated[
        str | None,
        typer.Option("--budgets", metavar="NUMBERS", help="Draft nodes to verify. [default: 4,8,16,32,64 as recorded]"),
    ] = None,
    cost: Annotated[
        str,
        typer.Option(
            "--cost",
            metavar="COSTS",
            help="What steps take: 'recorded' with the trace, cpu-bf16, cpu-fp32, h100, loaded, or a JSON file.",
        ),
    ] = "recorded",
    seeds: Annotated[
        int, typer.Option("--seeds", metavar="N", help="Replay N times, each with its own seed and stream order.")
    ] = 5,
    order: Annotated[
        str,
        typer.Option(
            "--order", metavar="ORDER", help="'shuffle', 'blocks' (one domain after the other), or 'as-recorded'."
        ),
    ] = "shuffle",
    switches: Annotated[
        int, typer.Option("--switches", metavar="S", help="How often the best switching play may change its arm.")
    ] = 8,
    guard: Annotated[
        float,
        typer.Option("--guard", metavar="SHARE", help="What learning may cost against no speculation; 0: no guard."),
    ] = 0.05,
    seed: options.Seed = 0,
    json_out: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the result as JSON.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="PNG", help="Draw the cumulative regret against the best fixed arm."),
    ] = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
) -> None:
    """Play strategies on a recorded trace, without the model: exactly what they would have done live at these costs.

    The comparators know what is to come: the best fixed arm of the stream, of each domain, of each prompt, the best
    play with a few switches, and the best arm at every step. Ctrl-C keeps the finished seeds.
    """
    from adaptspec.cli.common import check_at_least, console, show
    from adaptspec.cli.outputs import check_output, write_output
    from adaptspec.cli.progress import reporter
    from adaptspec.cli.regret_picture import draw
    from adaptspec.cli.replay_report import Plays, replay_table
    from adaptspec.control.trace_file import read_trace

    check_at_least(1, seeds=seeds)
    check_at_least(0, seed=seed, switches=switches)
    check_order(order)
    for path in (json_out, plot):
        if path is not None:
            check_output(path, force=force)
    recorded = only_drafters(read_trace(trace), drafters)
    arms = arms_for(recorded, budgets)
    plays = Plays(
        recorded,
        arms,
        strategies=choose(strategies, recorded, arms, guard=guard or None),
        costs=costs_named(cost, recorded),
        order=order,
        switches=switches,
        guard=guard or None,
    )
    interrupted = False
    with reporter(quiet=quiet) as progress:
        progress.total(seeds * (1 + len(plays.strategies)))
        try:
            for number in range(seed, seed + seeds):
                plays.play(number, progress)
        except KeyboardInterrupt:
            interrupted = True

    report = {
        "provenance": provenance_of(
            argv=sys.argv[1:] if context.obj is None else context.obj, path=trace, trace=recorded, seed=seed
        ),
        "options": {
            "cost": cost,
            "drafters": list(recorded.nodes),
            "arms": [str(arm) for arm in arms],
            "order": order,
            "switches": switches,
            "guard": guard,
        },
        "interrupted": interrupted,
        **plays.summary(),
    }
    if json_out is not None:
        written = write_output(json_out, json.dumps(report, ensure_ascii=False) + "\n", force=force)
        typer.echo(f"wrote {written}", err=True)
    if report["seeds"]:
        title = (
            f"{report['stream']['requests']} requests, {report['stream']['tokens']} tokens, {order}, costs: {cost}, "
            f"{len(report['seeds'])} seeds"
        )
        show(console(), replay_table(report, title=title))
        if plot is not None:
            typer.echo(f"picture: {write_output(plot, draw(report, title=title), force=force)}", err=True)
    if interrupted:
        typer.echo(f"adaptspec: interrupted after {len(report['seeds'])} finished seeds", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)


def check_order(order: str) -> None:
    """Raises ValueError unless it is the name of an order."""
    from typing import get_args

    from adaptspec.control.regret import Order
    from adaptspec.names import unknown_name

    if order not in get_args(Order):
        raise unknown_name("order", order, get_args(Order))


def only_drafters(trace: Trace, names: list[str] | None) -> Trace:
    """The trace with some of its drafters, or as it is."""
    from dataclasses import replace

    from adaptspec.cli.common import split_names
    from adaptspec.names import unknown_name

    wanted = split_names(names) or tuple(trace.nodes)
    for name in wanted:
        if name not in trace.nodes:
            raise unknown_name("drafter in the trace", name, trace.nodes)
    requests = tuple(replace(r, proposals={name: r.proposals[name] for name in wanted}) for r in trace.requests)
    if not any(request.positions for request in requests):
        raise ValueError("the trace has no request with a step in it")
    return replace(trace, requests=requests, nodes={name: trace.nodes[name] for name in wanted})


def arms_for(trace: Trace, budgets: str | None) -> tuple[Arm, ...]:
    """Every drafter at every budget, none larger than recorded."""
    from adaptspec.cli.common import parse_budgets
    from adaptspec.control.arms import check_budgets, make_arms

    most = min(trace.nodes.values())
    if budgets is None:
        return make_arms(list(trace.nodes), budgets=[b for b in BUDGETS if b <= most] or [most], vocab=("full",))
    chosen = check_budgets(parse_budgets(budgets))
    for budget in chosen:
        if budget != "auto" and budget > most:
            raise ValueError(f"budgets must be at most {most}, which was recorded, got {budget}")
    return make_arms(list(trace.nodes), budgets=chosen, vocab=("full",))


def choose(values: list[str] | None, trace: Trace, arms: tuple[Arm, ...], *, guard: float | None) -> tuple[str, ...]:
    """The strategies, each of which can be played with these arms."""
    from adaptspec.cli.common import choose_strategies
    from adaptspec.control.oracles import check_arms
    from adaptspec.control.strategies import make_controller
    from adaptspec.types import Arm

    names = choose_strategies(values)
    for name in names:
        make_controller(name, arms=arms, drafters=list(trace.nodes), guard=guard)
        if name.startswith("fixed:") and (arm := Arm.parse(name.removeprefix("fixed:"))).drafter != "ar":
            check_arms(trace, [Arm.autoregressive(), arm] if arm.budget != "auto" else [Arm.autoregressive()])
    return names


def costs_named(name: str, trace: Trace) -> Costs:
    """The costs of `--cost`."""
    from adaptspec.control.cost_world_file import read_costs
    from adaptspec.control.cost_worlds import PROFILES, profile_costs, recorded_costs
    from adaptspec.names import unknown_name

    recorded = recorded_costs(trace.costs)
    if name == "recorded":
        return recorded
    if name in PROFILES:
        return profile_costs(name, recorded)
    if not Path(name).exists():
        raise unknown_name("cost profile, and no such file", name, ["recorded", *PROFILES])
    return read_costs(name, recorded)


def provenance_of(*, argv: list[str], path: Path, trace: Trace, seed: int) -> dict[str, object]:
    """Where the numbers come from: this command, and what made the trace."""
    from adaptspec.cli.provenance import run_provenance

    origin = {"path": str(path), "fingerprint": trace.fingerprint, "provenance": dict(trace.provenance)}
    return {**run_provenance(argv=argv, seed=seed), "trace": origin}
