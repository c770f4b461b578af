"""`paceline rollouts`: reinforcement learning with one agent and several observers that ask it for actions."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.cartpole.request import RolloutRequest
from paceline.cli.options import AsJson, folder_option, new_folder
from paceline.cli.outcome import print_json, report, report_error
from paceline.errors import UnknownNameError, WorkerFailedError
from paceline.launch.base import Outcome
from paceline.observe import formats
from paceline.tasks import GAMES


def rollouts(
    game: Annotated[str, typer.Argument(help=f"The game to learn: {', '.join(GAMES)}.")],
    observers: Annotated[int, typer.Option(help="Processes that play, beside the agent's own.")] = (
        RolloutRequest.observers
    ),
    batched: Annotated[
        bool,
        typer.Option(
            "--batched/--unbatched", help="Answer all waiting questions in one batch, or each by itself."
        ),
    ] = RolloutRequest.batched,
    episodes: Annotated[
        int, typer.Option(help="Stop after so many episodes if the game is not solved earlier.")
    ] = RolloutRequest.episodes,
    seed: Annotated[int, typer.Option(help="Where all randomness comes from.")] = RolloutRequest.seed,
    out: Annotated[Path | None, folder_option("The run folder. Default: runs/GAME-TIME.")] = None,
    json_: AsJson = False,
) -> int:
    """Learn from episodes: observers play and ask one agent for every action; a lost observer costs only time."""
    from paceline.cli.cartpole.start import start

    if game not in GAMES:
        raise UnknownNameError("game", game, GAMES)
    request = RolloutRequest(episodes=episodes, observers=observers, batched=batched, seed=seed)
    folder = out or new_folder(game)
    try:
        result = start(request, folder)
    except WorkerFailedError as error:
        return report_error(error)
    except KeyboardInterrupt:
        return report(Outcome(results=(), interrupted=signal.SIGINT))
    result = {**result, "out": str(folder)}
    if json_:
        print_json(result)
    else:
        print(describe(result))  # noqa: T201
    return 0


def describe(result: Mapping[str, Any]) -> str:
    """Return in a few lines what came of it."""
    last = formats.plural(min(100, result["episodes"]), "episode")
    asked = "batched" if result["batched"] else "one call a step"
    lost = f", lost: {', '.join(result['lost'])}" if result["lost"] else ""
    rows = {
        "result": f"{'solved' if result['solved'] else 'not solved'}: mean return {result['mean_return']:.1f} "
        f"over the last {last} (solved at {result['goal']:g})",
        "work": f"{formats.plural(result['episodes'], 'episode')}, {formats.plural(result['steps'], 'step')}",
        "time": f"{formats.duration(result['wall_s'])}, {formats.count(result['steps_per_s'])} steps/s",
        "workers": f"1 agent, {formats.plural(result['observers'], 'observer')}, {asked}{lost}",
        "weights": f"sha256 {result['weights_sha256'][:16]}…",
        "model": result["model"] or "not saved",
        "folder": result["out"],
    }
    return "\n".join([f"\n{result['task']}", *(f" {name:8} {text}" for name, text in rows.items())])
