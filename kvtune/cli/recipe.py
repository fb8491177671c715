"""`kvtune recipe list|show|verify|export`: the recipes at hand. Nothing in a recipe is executed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvtune.cli import completion, options
from kvtune.cli.options import print_json
from kvtune.run.config import REPORTS
from kvtune.terminal import one_line

recipe = typer.Typer(help="Recipes: tuned settings of a model, with their evidence.", no_args_is_help=True)
Name = Annotated[
    str,
    typer.Argument(
        help="A recipe file, or a name that `kvtune recipe list` shows.", autocompletion=completion.recipes
    ),
]


@recipe.command("list")
def list_(json: options.Json = False) -> int:
    """List the recipes at hand, and whether they fit this installation."""
    from kvtune.tune.recipes.shelf import recipes, shipped
    from kvtune.tune.recipes.verify import state_of

    rows = [
        {
            "name": path.stem,
            "file": str(path),
            "shipped": shipped(path),
            **(state_of(loaded) if loaded else {"state": f"unusable: {why}"}),
        }
        for path, loaded, why in recipes()
    ]
    if json:
        print_json({"recipes": rows})
    for row in () if json else rows:
        where = f"{row['model']} on {row['device']}, " if "model" in row else ""
        says = "" if row["shipped"] or "model" not in row else ", as its maker says"
        print(one_line(f"{row['name']}: {where}{row['state']}{says}"))
    if not rows and not json:
        print("no recipes here: `kvtune tune MODEL -w WORKLOAD` writes one", file=sys.stderr)
    return 0


@recipe.command()
def show(
    name: Name,
    raw: Annotated[bool, typer.Option("--raw", help="Print the file, with every digit.")] = False,
    json: options.Json = False,
) -> int:
    """Show what a recipe sets, what it is evidence for, and how to use it."""
    import msgspec

    from kvtune.errors import KvtuneError
    from kvtune.report.console.recipe import recipe_lines
    from kvtune.terminal import width
    from kvtune.tune.recipes.shelf import find, load, shipped
    from kvtune.tune.recipes.verify import state_of

    path = find(name)
    loaded = load(path)
    if json:
        print_json(msgspec.to_builtins(loaded))
    elif raw:
        print(path.read_text(encoding="utf-8").rstrip())
    else:
        try:
            state = state_of(loaded)["state"]
        except KvtuneError as error:  # without vLLM a recipe can still be read
            state = error.message
        for line in recipe_lines(loaded, name, state, min(110, width(110)), shipped=shipped(path)):
            print(one_line(line))
    return 0


@recipe.command()
def verify(
    name: Name,
    rounds: Annotated[int, typer.Option(min=2, help="Engine runs of stock and of the recipe, at most.")] = 4,
    model: Annotated[
        str,
        typer.Option("--model", help="The recipe's model, where it is not a built-in one.", metavar="MODEL"),
    ] = "",
    trace: options.RunTrace = None,
    trust: options.Trust = False,
    anyway: options.Anyway = False,
    output: options.Output = REPORTS,
    json: options.Json = False,
) -> int:
    """Run a recipe's evidence again: exit 0 when it holds, 1 when it does not."""
    from kvtune.cli.views.plan import announce_study
    from kvtune.cli.views.trials import TrialsView
    from kvtune.errors import EXIT_FAILED
    from kvtune.extras import NEEDS, require
    from kvtune.tune.objective import OBJECTIVES
    from kvtune.tune.recipes.make import setup_of
    from kvtune.tune.recipes.shelf import find, load
    from kvtune.tune.recipes.verify import refuse_foreign
    from kvtune.tune.recipes.verify import verify as check
    from kvtune.workload.spec import build

    require(NEEDS["recipe verify"], "kvtune recipe verify")
    path = find(name)
    loaded = load(path)
    refuse_foreign(loaded, str(path), anyway, model=model, versions=False)
    setup, _ = setup_of(loaded, str(path), model=model, trace=trace, trusted=trust)
    if trust:
        options.trusting(path, setup.model, setup.engine_args)
    simulated = loaded.recipe.status == "simulated"
    runs = 0 if simulated else 2 * rounds + 1
    announce_study(
        setup,
        build(setup.load.spec, seed=setup.load.seed),
        output,
        replays=2 * simulated,
        runs=runs,
        most=True,
    )
    with TrialsView(runs, OBJECTIVES["hit-rate"]) as view:
        verified = check(
            loaded,
            str(path),
            rounds=rounds,
            output=output,
            say=view,
            anyway=anyway,
            model=model,
            trace=trace,
            trusted=trust,
        )
    if json:
        print_json({"recipe": str(path), **verified})
    else:
        print(one_line(f"{path}: {verified['text']}"))
    return 0 if verified["holds"] else EXIT_FAILED


@recipe.command()
def export(
    name: Name,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the files.")] = Path(),
) -> int:
    """Write config.yaml, and env.sh for kvtune's core: plain `vllm serve --config config.yaml` runs the recipe."""
    from kvtune.tune.recipes.shelf import export as write
    from kvtune.tune.recipes.shelf import find, load

    for path in write(load(find(name)), output):
        print(one_line(str(path)))
    return 0
