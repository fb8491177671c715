"""What runs: the set-up of one engine and its load, one frozen value. Plain data, sent as JSON to host and simulator.

A command builds one; a plan (sweep, tune, explain) derives others from it. What belongs to one kind of device
alone stands in that device's value: `Real`, `Timed` (`--on host`) or `Simulated` (`--on sim`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec
from msgspec.structs import replace

from kvtune.base.errors import KvtuneError, UsageError
from kvtune.base.legal import Value
from kvtune.data.flags import flag_value, settings_given, with_drafts, with_flag
from kvtune.data.knobs import CORE, DRAFTS, TIER, TIER_SIZE, keeps_specs
from kvtune.data.layout.models import engine_defaults
from kvtune.data.platforms import Platform, device
from kvtune.data.recipe import Recipe, engine_flags
from kvtune.data.run.extras import Router
from kvtune.data.run.types import Run
from kvtune.lab.device.cost import NOMINAL, CopyTime, StepCost
from kvtune.lab.device.settings import Timed, nominal
from kvtune.lab.setup.offload_flags import joined, without_tier
from kvtune.lab.setup.platform import engines
from kvtune.lab.setup.resolve import SIZE_POOL, check_pool, refuse_api_servers, resolve
from kvtune.requests.loads.spec import build, traced
from kvtune.requests.types import Workload

if TYPE_CHECKING:
    from kvtune.requests.loads.sources import Sources

CoreName = Literal["kvtune", "stock"]

USUAL: dict[str, Any] = {"slo": {}, "engine_on": "model", "like_device": ""}
"""Fields of `filed` that files and names of files leave out if they have these values."""

POOL = "num_gpu_blocks_override"
POOL_FLAG = POOL.replace("_", "-")

BUILT = "workload"


class Load(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The requests that the engine gets: a workload's spec, seed and hash. `slo`: the limits that count as goodput.

    A load keeps the workload that was built of it, as long as the load is kept; its JSON has none.
    """

    spec: str = ""
    seed: int = 0
    hash: str = ""
    slo: dict[str, float] = {}

    @classmethod
    def of(cls, workload: Workload, slo: dict[str, float] | None = None) -> Self:
        load = cls(spec=workload.spec, seed=workload.seed, hash=workload.hash, slo=slo or {})
        vars(load)[BUILT] = workload
        return load

    def built(self, sources: Sources | None = None) -> Workload:
        """Return the workload, built once. KvtuneError if its file has changed since the set-up was made."""
        kept: Workload | None = vars(self).get(BUILT)
        if kept is not None:
            return kept
        workload = build(self.spec, seed=self.seed, sources=sources)
        if self.hash and workload.hash != self.hash:
            raise KvtuneError(
                f"the workload {self.spec!r} has changed since the command started",
                "do not change its file while the command runs",
            )
        vars(self)[BUILT] = workload
        return workload


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """How large the KV cache is, beside what flags say.

    block_tokens: the block size in which `--num-gpu-blocks-override` counts; 0: not known.
    memory_bytes: the simulated device's memory, which sizes the pool if no flag does; 0: a flag or KV specs do.
    unknown: why the device's memory does not tell the pool's size.
    """

    block_tokens: int = 0
    memory_bytes: int = 0
    unknown: str = ""


class Real(msgspec.Struct, frozen=True, kw_only=True, tag="real"):
    """This machine's device: the model runs."""


class Simulated(msgspec.Struct, frozen=True, kw_only=True, tag="simulated"):
    """No model and no processes: a replay on a virtual clock.

    cost: how long a step takes. copy: the time of copies to and from a tier of host memory (--kv-offloading-size).
    specs: KV specs captured from a real run (`header.engine.kv_specs`); the model is then not built.
    async_scheduling: None: vLLM's default on this machine; engines on GPUs use True.
    block_tokens: tokens per block; None: as this machine's attention kernels choose.
    digests: record a checksum of each step's scheduled tokens and block ids.
    shortcuts: use the faster code of `fast/`, which makes the same decisions (a test compares them).
    idle: after the replay, measure what an idle conversation of this many tokens keeps (lab/sim/idle.py); 0: do not.
    verdicts: for `kvtune explain`, add to header.extra why each prompt's tokens hit or missed.
    token_rows: leave out the tokens table of a workload that generates more tokens than this.
    requests: positions in the workload of the requests to replay; empty: all requests.
    end_s: the replay ends at this time of its clock, with requests in flight and unsent; 0: when all have finished.
    replicas: engines like this one that share the load, each with its own cache.
    router: which of them gets a request (lab/sim/routers.py). Empty: one engine, and no router.
    routed: for router "given", each request's replica, in workload order.
    """

    cost: StepCost = NOMINAL
    copy: CopyTime = CopyTime()
    specs: dict[str, Any] = {}
    async_scheduling: bool | None = None
    block_tokens: int | None = None
    digests: bool = False
    shortcuts: bool = True
    idle: int = 0
    verdicts: bool = False
    token_rows: int = 4_000_000
    requests: list[int] = []
    end_s: float = 0.0
    replicas: int = 1
    router: Router = ""
    routed: list[int] = []


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: its model, vLLM's flags, core, pool and device, and the load that it gets.

    model: what `vllm serve` takes, or a built-in name.
    engine_args: vLLM's own flags.
    core_settings: those that differ from the core's defaults; of stock, none.
    dummy: random weights.
    platform: the device of --like-device, whose defaults the engine gets; None: this machine's.
    from_recipe: names of the vLLM settings in `engine_args` that come from a recipe.
    vllm: the version that it was made with; "": the installed one.
    """

    model: str
    load: Load = Load()
    engine_args: list[str] = []
    core: CoreName = "stock"
    core_settings: dict[str, Any] = {}
    dummy: bool = False
    pool: Pool = Pool()
    device: Real | Timed | Simulated = Real()
    platform: Platform | None = None
    from_recipe: list[str] = []
    vllm: str = ""

    @classmethod
    def of_run(cls, run: Run, *, model: str = "", trusted: bool = False) -> Self:
        """Return the set-up that replays a run's engine with the requests it sent, with step times fitted to the run's.

        `model`: the one that the user named. `trusted`: the user vouches for the run file (lab/setup/like.py).
        """
        import numpy as np

        from kvtune.lab.setup.like import copy_of, cost_of, model_and_flags

        header, engine = run.header, run.header.engine
        sent = np.isfinite(run.table("requests")["sent_s"])
        replayed, flags = model_and_flags(run, named=model, trusted=trusted)
        active = header.core.name == "kvtune" and header.core.active
        return msgspec.convert(
            {
                "model": replayed,
                # Several engines are replayed as a fleet of engines like one of them.
                "engine_args": with_flag(flags, "data-parallel-size", None),
                "core": "kvtune" if active else "stock",
                "core_settings": header.core.settings if active else {},
                "platform": device(engine.like_device) if engine.like_device else None,
                "device": Simulated(
                    specs=engine.kv_specs,
                    async_scheduling=engine.async_scheduling,
                    cost=cost_of(run),
                    copy=copy_of(run),
                    requests=[] if sent.all() else np.flatnonzero(sent).tolist(),
                ),
            },
            cls,
        )

    @classmethod
    def of_file(cls, fields: Mapping[str, Any]) -> Self:
        """Return the set-up that a study or a recipe's evidence holds (`filed`). ValueError names what is wrong."""
        engine_on, like = fields.get("engine_on", "model"), fields.get("like_device", "")
        if engine_on not in ("model", "host"):
            raise ValueError(f"engine_on is {str(engine_on)[:40]!r}")
        load = {"spec": "spec", "seed": "seed", "hash": "workload_hash", "slo": "slo"}
        kept = ("model", "core_settings", "engine_args", "dummy", "vllm")
        msgspec.convert(fields.get("core_settings", {}), dict[str, Value])
        return msgspec.convert(
            {
                **{name: fields[name] for name in kept if name in fields},
                "core": fields.get("core", "kvtune"),
                "load": {name: fields[old] for name, old in load.items() if old in fields},
                "pool": {"block_tokens": fields.get("block_tokens", 0)},
                "device": nominal() if engine_on == "host" else Real(),
                "platform": device(str(like)) if like else None,
            },
            cls,
        )

    @classmethod
    def of_recipe(
        cls, recipe: Recipe, where: str, *, model: str = "", trace: Path | None = None, trusted: bool = False
    ) -> Self:
        """Return the set-up of a recipe's evidence. UsageError for incomplete evidence; `where` names the recipe.

        `model`, `trace`: named by the user. `trusted`: the user vouches for the file. Without them, the model must be
        built into kvtune, the workload must not be a trace, and only flags that a file may give are accepted.
        """
        from kvtune.data.file_flags import allowed_flags
        from kvtune.data.layout.models import builtin
        from kvtune.lab.setup.resolve import tokenizer_of

        evidence, own = recipe.evidence, recipe.recipe.model
        if not (model or trusted or builtin(own) is not None):
            raise UsageError(
                f"{where}: the model {own} is only named in the file",
                "name the model yourself: --model MODEL; or, for a file of your own, add --trust",
            )
        try:
            spec = str(evidence["workload"])
            if trace is not None or not trusted:
                spec = traced(spec, trace, tokenizer_of(model))
            flags = [str(word) for word in evidence["engine_args"]]
            return cls.of_file(
                {
                    **{name: evidence[name] for name in USUAL if name in evidence},
                    "model": model or own,
                    "core": recipe.recipe.core,
                    "spec": spec,
                    "seed": int(evidence["seed"]),
                    "workload_hash": str(evidence["workload_hash"]),
                    "engine_args": allowed_flags(flags, where, trusted=trusted),
                    "block_tokens": int(evidence.get("block_tokens", 0)),
                    "dummy": bool(evidence.get("dummy", False)),
                    "vllm": recipe.recipe.vllm,
                }
            )
        except UsageError as error:
            raise UsageError(f"{where}: {error.message.removeprefix(f'{where}: ')}", error.hint) from error
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{where}: [evidence] lacks {error}",
                "only a recipe that `kvtune tune` wrote can be verified",
            ) from error

    def filed(self) -> dict[str, Any]:
        """Return the set-up as the files of studies hold it: flat, in this order. `of_file` reads it."""
        return {
            "model": self.model,
            "spec": self.load.spec,
            "seed": self.load.seed,
            "workload_hash": self.load.hash,
            "core": self.core,
            "core_settings": self.core_settings,
            "engine_args": self.engine_args,
            "block_tokens": self.pool.block_tokens,
            "dummy": self.dummy,
            "vllm": self.vllm,
            "slo": self.load.slo,
            "engine_on": "host" if isinstance(self.device, Timed) else "model",
            "like_device": self.platform.key if self.platform is not None else "",
        }

    @property
    def simulated(self) -> Simulated:
        """How a replay of this engine goes: as its device says if it is simulated, else as every simulation does."""
        return self.device if isinstance(self.device, Simulated) else Simulated()

    @property
    def machine(self) -> Platform:
        """The platform whose defaults the engine uses."""
        timed = isinstance(self.device, Timed) and not self.device.specs
        return engines(self.platform, timed=timed)

    def replayed(self, **changes: Any) -> Self:
        """Return the set-up on a simulated device, with these fields of `Simulated` changed."""
        platform = self.platform
        if isinstance(
            self.device, Timed
        ):  # a timed device has the defaults of a GPU where this machine has none
            platform = self.machine if self.machine.key else None
        return replace(self, device=replace(self.simulated, **changes), platform=platform)

    def with_load(self, workload: Workload) -> Self:
        """Return the set-up with another load, without limits of latency."""
        return replace(self, load=Load.of(workload))

    def with_core(self, **settings: Value) -> Self:
        """Return the set-up with kvtune's core and these of its settings changed."""
        current = self.core_settings if self.core == "kvtune" else {}
        return replace(self, core="kvtune", core_settings={**current, **settings})

    def with_flags(self, **flags: int | str | None) -> Self:
        """Return the set-up with these vLLM flags changed or added; None removes a flag."""
        words = list(self.engine_args)
        for name, value in flags.items():
            words = with_flag(words, name.replace("_", "-"), value)
        return replace(self, engine_args=words)

    def stock(self) -> Self:
        """Return the set-up with vLLM's own core."""
        return replace(self, core="stock", core_settings={})

    def with_knobs(self, knobs: Mapping[str, Value]) -> Self:
        """Return the set-up with these knobs of `kvtune.data.knobs` set. Stock has none of the core's.

        A pool given in blocks keeps its size in tokens if the block size changes, and in bytes if blocks are packed.
        KV specs captured from a run are left out where a knob changes them.
        """
        flags, changed = list(self.engine_args), {n: v for n, v in knobs.items() if n not in CORE}
        given, counted = flag_value(flags, POOL_FLAG), self.pool.block_tokens
        if given is not None and POOL not in changed:
            if "block_size" in changed and counted:
                blocks, size = _whole(given, POOL_FLAG), _whole(changed["block_size"], "block-size")
                changed[POOL] = max(2, blocks * counted // size)
            if knobs.get("packed"):
                states = _whole(knobs.get("states_per_block", 1), "core.states_per_block")
                changed[POOL] = self._packed(_whole(given, POOL_FLAG), states)
        if changed.get(TIER_SIZE) == 0:
            flags = without_tier(flags)
            changed = {n: v for n, v in changed.items() if n not in (TIER_SIZE, *TIER)}
        if DRAFTS in changed:
            flags = with_drafts(flags, int(changed.pop(DRAFTS)))
        settings = {**self.core_settings, **{n: v for n, v in knobs.items() if n in CORE}}
        settings = settings if self.core == "kvtune" else {}
        device = self.device
        if isinstance(device, Simulated) and not all(map(keeps_specs, {**knobs, **settings})):
            device = replace(device, specs={})
        flags = joined(flags, engine_flags(changed))
        return replace(self, engine_args=flags, core_settings=settings, device=device)

    def _packed(self, blocks: int, states: int) -> int:
        """Return how many packed blocks fit in the memory of these blocks of stock's layout."""
        from kvtune.data.layout.config import shape_of
        from kvtune.data.layout.model_config import model_config
        from kvtune.data.layout.plan import backend_of, least_aggregate_tokens, plan_aggregate, plan_per_layer

        config = model_config(self.model).fields
        if not config:
            return blocks
        state_dtype = flag_value(self.engine_args, "mamba-ssm-cache-dtype") or "auto"
        backend, float32 = backend_of(self.machine), self.machine.float32_states
        try:
            shape = shape_of(config, self.model, state_dtype=state_dtype, float32_states=float32)
            stock = plan_per_layer(shape, backend, self.pool.block_tokens).block_bytes
            least = least_aggregate_tokens(shape, backend, states)
            packed = plan_aggregate(shape, backend, least).block_bytes
        except KvtuneError:
            return blocks
        return max(2, blocks * stock // packed)

    @property
    def sizes_pool(self) -> bool:
        """Whether flags set the size of the KV cache."""
        return any(flag_value(self.engine_args, n) is not None for n in (POOL_FLAG, "kv-cache-memory-bytes"))

    def with_pool(self, blocks: int, block_tokens: int) -> Self:
        """Return the set-up with a pool of this size, unless flags give one or the size is not known."""
        if not blocks or self.sizes_pool:
            return self
        flags = [*self.engine_args, f"--{POOL_FLAG}", str(blocks)]
        return replace(self, engine_args=flags, pool=replace(self.pool, block_tokens=block_tokens))

    def as_ran(self, run: Run) -> Self:
        """Return the set-up simulated as an engine ran it: its pool, KV specs, scheduling and step times."""
        from kvtune.lab.setup.like import copy_of, fitted

        engine = run.header.engine
        return self.with_pool(engine.num_blocks, engine.block_size).replayed(
            cost=fitted(run),
            specs=engine.kv_specs,
            async_scheduling=engine.async_scheduling,
            copy=copy_of(run),
        )

    def like(self, run: Run, *, trusted: bool = False) -> Self:
        """Return the set-up on a device like a recorded run's: its KV specs, pool, step times; its flags under ours.

        KvtuneError if a timed device cannot be fitted to the run. `trusted`: the user vouches for the run file.
        """
        from kvtune.lab.setup.like import copy_of, cost_of, engine_of

        engine = engine_of(run, trusted=trusted, several=bool(self.simulated.router))
        recorded = {"specs": engine.kv_specs, "copy": copy_of(run)}
        target: Timed | Simulated
        if isinstance(self.device, Timed):
            from kvtune.lab.device.fit import fit

            cost = cost_of(run) if run.header.extra.step_cost else fit(run, "device")
            target = replace(
                self.device, cost=cost, name=f"like {engine.device_name or engine.device}", **recorded
            )
            platform = self.platform
        else:
            scheduling = engine.async_scheduling
            target = replace(self.simulated, cost=cost_of(run), async_scheduling=scheduling, **recorded)
            platform = device(engine.like_device) if engine.like_device else None
        return replace(self, engine_args=[*engine.args, *self.engine_args], device=target, platform=platform)

    def refuse(self) -> None:
        """Raise UsageError for a combination that cannot work, before anything starts."""
        if self.platform is not None and not isinstance(self.device, Simulated):
            raise UsageError(
                f"--like-device {self.platform.key} is for simulations: an engine runs on this machine's device",
                "add --on sim",
            )
        if not isinstance(self.device, Simulated):
            refuse_api_servers(self.engine_args)
        if self.core == "stock" and self.core_settings:
            raise UsageError(
                f"core.{next(iter(self.core_settings))} is a setting of kvtune's core, and --core stock has none",
                "leave out --core stock, or the setting",
            )
        count = flag_value(self.engine_args, "data-parallel-size") or "1"
        if isinstance(self.device, Simulated) and count != "1":
            raise UsageError(
                f"--data-parallel-size {count}: a replay has one engine, whose cache no other engine shares",
                f"leave it out; --on sim --replicas {count} has that many, behind vLLM's balancer",
            )

    @property
    def by_memory(self) -> bool:
        """Whether the device's memory sizes the pool of a `sized` set-up: no flag does, and no recorded KV specs."""
        if not self.pool.memory_bytes or self.simulated.specs:
            return False
        given = settings_given(self.engine_args) | engine_defaults(self.model, self.machine.runs_on).keys()
        return not given & SIZE_POOL

    def sized(self) -> Self:
        """Return the set-up to simulate, with the device's memory, which sizes the pool if no flag does.

        UsageError if the engine cannot be simulated, or if its pool's size is unknown.
        """
        setup = self.replayed()
        setup.refuse()
        if setup.simulated.specs:
            return setup
        platform = setup.machine
        words = resolve(self.model, dummy=True, engine_args=self.engine_args, platform=platform).args
        check_pool(words, platform.memory_bytes)
        return replace(setup, pool=replace(self.pool, memory_bytes=platform.memory_bytes))


def _whole(value: Value, flag: str) -> int:
    """Return a flag's value as a number from 1 up. UsageError for any other value, as a study may be from anyone."""
    text = str(value)
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text)):
        raise UsageError(f"--{flag} {text[:40]} is not a whole number from 1 up", "give for instance 3000")
    return int(text)
