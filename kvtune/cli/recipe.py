"""`kvtune recipe list|show|verify|export`: the recipes at hand. Nothing in a recipe is executed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvtune.cli import options
from kvtune.cli.query import Lab, Query, When, command_of, option
from kvtune.data.run.output import REPORTS
from kvtune.data.show.terminal import one_line

recipe = typer.Typer(help="Recipes: tuned settings of a model, with their evidence.", no_args_is_help=True)
Name = Annotated[
    str,
    typer.Argument(help="A recipe file, or a name that `kvtune recipe list` shows."),
]


@dataclass(frozen=True, kw_only=True)
class ListQuery(Query):
    json: options.Json = False


def list_(query: ListQuery) -> int:
    """List the recipes at hand, and whether they fit this installation."""
    from kvtune.answers.tune.recipes.shelf import recipes, shipped
    from kvtune.answers.tune.recipes.verify import ListedRecipe, Listing, state_of
    from kvtune.cli.views.answer import print_answer

    rows = [
        ListedRecipe(
            name=path.stem,
            file=str(path),
            shipped=shipped(path),
            state=state_of(loaded) if loaded else f"unusable: {why}",
            model=loaded.recipe.model if loaded else "",
            device=loaded.recipe.device if loaded else "",
        )
        for path, loaded, why in recipes()
    ]
    listing = Listing(rows)
    print_answer(listing, listing.document(), json=query.json)
    return 0


@dataclass(frozen=True, kw_only=True)
class ShowQuery(Query):
    name: Name
    raw: bool = option(False, When("what is printed, and so is --json", json=False))("""Print the file, with
        every digit.""")
    json: options.Json = False
    md: options.Md = False
    page: options.Page = None


def show(query: ShowQuery) -> int:
    """Show what a recipe sets, what it is evidence for, and how to use it."""
    from kvtune.answers.tune.recipes.shelf import find, load, shipped
    from kvtune.answers.tune.recipes.verify import state_of
    from kvtune.base.bounded import MOST_TOML
    from kvtune.base.errors import KvtuneError
    from kvtune.base.files import read_regular
    from kvtune.cli.views.answer import print_answer
    from kvtune.reading.report.recipe import document

    path = find(query.name)
    loaded = load(path)
    if query.raw:
        print(read_regular(path, MOST_TOML).decode().rstrip())
        return 0
    try:
        state = state_of(loaded)
    except KvtuneError as error:  # without vLLM a recipe can still be read
        state = error.message
    shown = document(loaded, query.name, state, shipped=shipped(path))
    print_answer(loaded, shown, json=query.json, md=query.md, page=query.page)
    return 0


@dataclass(frozen=True, kw_only=True)
class VerifyQuery(Query):
    FACTS = {"of": {"engine": "a recipe that an engine confirmed"}}
    name: Name
    rounds: int = option(4, When("for runs of an engine", of="engine"), min=2)("""Engine runs of stock and of
        the recipe, at most.""")
    model: str = option("", "MODEL")("The recipe's model, where it is not a built-in one.")
    trace: options.RunTrace = None
    trust: options.Trust = False
    anyway: options.Anyway = False
    output: options.Output = REPORTS
    json: options.Json = False


def verify(query: VerifyQuery, lab: Lab) -> int:
    """Run a recipe's evidence again: exit 0 when it holds, 1 when it does not."""
    from msgspec.structs import replace

    from kvtune.answers.tune.objective import OBJECTIVES
    from kvtune.answers.tune.recipes.shelf import find, load
    from kvtune.answers.tune.recipes.verify import refuse_foreign
    from kvtune.answers.tune.recipes.verify import verify as check
    from kvtune.base.errors import EXIT_FAILED
    from kvtune.base.extras import NEEDS, require
    from kvtune.cli.views.answer import print_answer
    from kvtune.cli.views.plan import announce_study
    from kvtune.cli.views.trials import TrialsView
    from kvtune.lab.setup.setup import Setup
    from kvtune.reading.analysis.comparison.compare import FEWEST
    from kvtune.requests.loads.spec import build

    require(NEEDS["recipe verify"], "kvtune recipe verify")
    path = find(query.name)
    loaded = load(path)
    refuse_foreign(loaded, str(path), query.anyway, model=query.model, versions=False)
    simulated = loaded.recipe.status == "simulated"
    query.refuse(of="sim" if simulated else "engine")
    setup = Setup.of_recipe(loaded, str(path), model=query.model, trace=query.trace, trusted=query.trust)
    if query.trust:
        options.trusting(path, setup.model, setup.engine_args)
    runs = 0 if simulated else 2 * query.rounds + 1
    announce_study(
        setup,
        build(setup.load.spec, seed=setup.load.seed),
        query.output,
        replays=2 * simulated,
        runs=runs,
        fewest=FEWEST * 2,
    )
    with TrialsView(2 * simulated, OBJECTIVES["hit-rate"]) as view:
        verified = check(
            loaded,
            str(path),
            lab=lab,
            rounds=query.rounds,
            output=query.output,
            say=view,
            anyway=query.anyway,
            model=query.model,
            trace=query.trace,
            trusted=query.trust,
        )
    verified = replace(verified, recipe=str(path))
    print_answer(verified, verified.document(), json=query.json)
    return 0 if verified.holds else EXIT_FAILED


@dataclass(frozen=True, kw_only=True)
class ExportQuery(Query):
    name: Name
    output: Path = option(Path(), "-o,--output FOLDER", parser=options.new_folder)("Folder for the files.")


def export(query: ExportQuery) -> int:
    """Write config.yaml, and env.sh for kvtune's core: plain `vllm serve --config config.yaml` runs the recipe."""
    from kvtune.answers.tune.recipes.shelf import export as write
    from kvtune.answers.tune.recipes.shelf import find, load

    for path in write(load(find(query.name)), query.output):
        print(one_line(str(path)))
    return 0


for _name, _command in (("list", list_), ("show", show), ("verify", verify), ("export", export)):
    recipe.command(_name)(command_of(_command))
