"""`Swarm`: a peer's membership of a run, as the user's thread sees it."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

import torch

from moshpit.config import SwarmConfig
from moshpit.errors import ClosedError, ConfigError, LocalError, WaitTimeoutError
from moshpit.events import EpochReport, Notice
from moshpit.protocol.machine import Leave, Signer, View
from moshpit.runtime.autocodec import codec_or_auto
from moshpit.runtime.background import Bridge, NetworkThread
from moshpit.runtime.company import (
    NUMEL_BYTES,
    SwarmStats,
    all_attached,
    check_others,
    missing_peers,
)
from moshpit.runtime.driver import Driver, Listeners
from moshpit.runtime.jobs import Averaging, free_vector
from moshpit.runtime.parcels import SwarmParcels
from moshpit.runtime.reach import Reach
from moshpit.runtime.record import own_record
from moshpit.runtime.states import StateSync
from moshpit.runtime.told import NoticeLog
from moshpit.tensors.codecs import ErrorFeedback
from moshpit.tensors.layout import ChunkPlan, VectorLayout
from moshpit.tensors.reduce import is_finite
from moshpit.transport.base import Transport
from moshpit.types import Address, PeerId, Role, RunId, short
from moshpit.wire.messages import Admission, PeerRecord

REPORT_INTERVAL_S = 0.5  # not sooner than anybody is told of it (ProgressConfig)
REPORT_SHARE = 0.1  # guess: or when so much of an epoch was done since
DEFAULT_CODEC = "float32"


class Swarm:
    """A peer in a run. Made by `moshpit.join`; close it, or use it in a ``with`` block.

    The network lives in a thread of its own, from here to `close`. All methods may be called
    from any thread; none of them but those that say so waits for the network.

    Attributes:
        peer_id: this peer's public key.
        run_id: the run's.
    """

    def __init__(
        self,
        signer: Signer,
        role: Role,
        admission: Admission,
        transport: Transport,
        config: SwarmConfig,
        *,
        contacts: Sequence[Address] = (),
        reach: Reach | None = None,
        bandwidth: float = 0.0,
        bridge: Bridge | None = None,
    ) -> None:
        self.peer_id: PeerId = signer.peer
        self.run_id: RunId = signer.run
        self._config = config
        self._due_epoch = -1
        self._samples_due = False
        self._target = 0.0
        self._schema = b""
        self._reported = (0.0, 0.0)
        self._numel = 0
        self._plan: ChunkPlan | None = None
        self._last_flat: Averaging | None = None
        self._began = False
        self._parcels: SwarmParcels | None = None
        self._closed = False
        self._close_lock = threading.Lock()
        self._owner = os.getpid()
        self._thread = bridge or NetworkThread(f"moshpit-{short(self.peer_id)}")
        self.clock = self._thread.waiting.clock
        self._listeners = Listeners([NoticeLog(self.clock)], self._on_due)
        record = own_record(signer.peer, role, (), admission, bandwidth)

        async def start() -> Driver:
            driver = Driver(
                signer, record, config, transport,
                listeners=self._listeners, rng=self._thread.rng, waiting=self._thread.waiting,
            )  # fmt: skip
            try:
                await driver.start(contacts, reach)
            except BaseException:
                await driver.close()
                raise
            return driver

        try:
            self._driver = self._thread.call(start())
        except BaseException:
            self._thread.stop()
            raise
        self.states = StateSync(self._thread, self._driver, self.peer_id, self._declare)
        self.addresses: tuple[Address, ...] = transport.addresses
        atexit.register(self.close)

    @property
    def role(self) -> Role:
        """What this peer does: a worker that nobody can dial becomes a client."""
        return Role(self._driver.node.view.me.role)

    # --- who is there ---------------------------------------------------------------------

    def peers(self) -> list[PeerRecord]:
        """Return the records of all live peers, this one included, sorted by id."""
        return self._thread.call(self._driver.records())

    def knows(self, peer: PeerId) -> bool:
        """Whether a peer is, or was lately, in the run. For the network thread only."""
        return self._driver.node.view.record(peer) is not None

    def wait_for_peers(self, n: int, timeout_s: float = 60.0) -> None:
        """Wait until at least ``n`` peers are live, this one included.

        Raises:
            WaitTimeoutError: they were not there in time; says who was. It is a `TimeoutError`.
        """
        if not self._wait_for(lambda view: len(view.live) >= n, timeout_s):
            raise WaitTimeoutError(missing_peers(self.peers(), self.peer_id, n, timeout_s))

    def _wait_for(self, wanted: Callable[[View], bool], timeout_s: float) -> bool:
        return self._thread.call(self._driver.until(wanted, timeout_s))

    def peers_now(self) -> list[PeerId]:
        """Return the live workers that average the same as this peer, sorted by id."""
        return self.parcels.peers_now()

    @property
    def parcels(self) -> SwarmParcels:
        """Vectors to and from single peers, for the strategies of `moshpit.baselines`."""
        if self._parcels is None:
            driver = self._driver
            self._parcels = SwarmParcels(self._thread, driver.parcels, lambda: driver.node.view)
        return self._parcels

    # --- averaging ------------------------------------------------------------------------

    def average(
        self,
        tensors: Sequence[torch.Tensor],
        weight: float = 1.0,
        timeout_s: float | None = None,
        codec: str = DEFAULT_CODEC,
    ) -> tuple[list[torch.Tensor], EpochReport]:
        """Average tensors with all peers that call this, and wait for the result.

        Each peer gets ``Σ wᵢ xᵢ / Σ wᵢ`` over the peers that the report names, after as many
        rounds as the grid has axes.

        Args:
            tensors: floating-point tensors; the same shapes and dtypes at all peers. They
                are read, not changed.
            weight: this peer's mass, at least 0; with 0 it only takes the mean.
            timeout_s: how long to wait at most.
            codec: how this peer's numbers are written on the wire, such as ``"float16"``, or
                ``"auto"``: as its link and the others' ask for. Peers may differ. See
                docs/reference/codecs.md.

        Returns:
            New tensors of the same shapes and dtypes, and what really happened.

        Raises:
            LayoutError: tensors that cannot be averaged.
            ConfigError: a weight that is negative or not finite, or values that are not.
            WaitTimeoutError: no end within ``timeout_s`` seconds.
            ClosedError: the swarm is closed.

        Source: paper §3.1, design §4.
        """
        layout = self._attach_tensors(tensors)
        vector = layout.as_vector(tensors)
        if vector is not None:
            job = self._run(vector, weight, timeout_s, codec, lent=True)
            return [job.mean.view(tensors[0].shape)], job.report
        job = self._run(self._flatten(layout, tensors), weight, timeout_s, codec, in_place=True)
        results = [torch.empty_like(t, device="cpu") for t in tensors]
        layout.write_back(job.mean, results)
        return results, job.report

    def average_(
        self,
        tensors: Sequence[torch.Tensor],
        weight: float = 1.0,
        timeout_s: float | None = None,
        codec: str = DEFAULT_CODEC,
    ) -> EpochReport:
        """Average tensors in place: as `average`, but the means take the tensors' own place.

        This needs the least memory and time, above all for a single contiguous float32 tensor
        on the CPU, which is not copied at all.

        Args:
            tensors: as for `average`; they are changed. If an exception is raised, some parts
                may hold means already and others still this peer's values.
            weight: as for `average`.
            timeout_s: as for `average`.
            codec: as for `average`.

        Returns:
            What really happened; parts that are ``missing`` keep this peer's values.

        Raises:
            As `average`.
        """
        layout = self._attach_tensors(tensors)
        vector = layout.as_vector(tensors)
        if vector is not None:
            return self._run(vector, weight, timeout_s, codec, in_place=True, lent=True).report
        job = self._run(self._flatten(layout, tensors), weight, timeout_s, codec, in_place=True)
        layout.write_back(job.mean, tensors)
        return job.report

    def _attach_tensors(self, tensors: Sequence[torch.Tensor]) -> VectorLayout:
        layout = VectorLayout(tensors)
        if self.attach(layout.schema, layout.numel, self._target):
            # The others have just started, too: see what they average before we count them.
            self._wait_for(all_attached, self._config.matchmaking.window_s_first)
        return layout

    def _flatten(self, layout: VectorLayout, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copy the tensors into one vector, in memory that was used before if it is free."""
        vector = free_vector(self._last_flat, layout.numel)
        layout.flatten_into(vector, tensors)
        return vector

    def _run(
        self,
        vector: torch.Tensor,
        weight: float,
        timeout_s: float | None,
        codec: str,
        *,
        in_place: bool = False,
        lent: bool = False,
    ) -> Averaging:
        assert self._plan is not None
        if weight > 0 and not is_finite(vector):
            raise ConfigError(
                "the vector holds NaN or infinite values; the others would refuse it. "
                "With weight 0 it can still be replaced by their mean"
            )
        job = Averaging(
            vector,
            self._plan,
            codec_or_auto(codec),
            in_place=in_place,
            lent=lent,
            waiting=self._thread.waiting,
        )
        self._begin(job, vector, weight, None, always_weighs=True)
        if not lent:
            self._last_flat = job
        try:
            job.wait(timeout_s)
        except BaseException:
            if lent and self._thread.running:  # the caller uses its tensors again
                self._thread.call(self._driver.abandon(job))
            raise
        return job

    def attach(
        self, schema: bytes, numel: int, samples_per_epoch: float, *, epoch: int = 0
    ) -> bool:
        """Say what this peer averages; strategies call it once, `average` by itself.

        Args:
            schema: 8 bytes that are equal only for equal layouts (`VectorLayout.schema`).
            numel: how many numbers the vector has.
            samples_per_epoch: of the whole swarm; 0 if averaging begins only on request.
            epoch: what this peer's values are of, if they come from a checkpoint. The swarm
                goes on from the newest epoch that any of its peers has.

        Returns:
            Whether this is news; saying the same again does nothing.

        Raises:
            LayoutError: the others average something else.
            ConfigError: this is an aux peer.
        """
        if self.role is Role.AUX:
            raise ConfigError(
                "an aux peer has no values of its own: it reduces for others and takes no script. "
                "Start it with `moshpit run --role aux --ticket ...`, or be a worker or a client"
            )
        wire_schema = schema + numel.to_bytes(NUMEL_BYTES, "little")
        if (wire_schema, samples_per_epoch) == (self._schema, self._target):
            return False
        plan = ChunkPlan.of(numel, self._config.transport)

        async def attach() -> None:
            check_others(self._driver.node.view, self.peer_id, wire_schema)
            self._driver.attach(wire_schema, samples_per_epoch, epoch)

        self._thread.call(attach())
        self._schema, self._numel, self._target = wire_schema, numel, samples_per_epoch
        self._plan = plan
        return True

    def _declare(self, schema: bytes, epoch: int = 0) -> None:
        """Tell the swarm what is averaged here now, and which epoch the values are of."""

        async def declare() -> None:
            self._driver.attach(schema, self._target, epoch)

        self._thread.call(declare())
        self._schema = schema

    @property
    def epoch(self) -> int:
        """The epoch that this peer works on."""
        return self._driver.node.epoch

    @property
    def averaging_due(self) -> bool:
        """Whether it is time for `begin_averaging`: the target is met, or groupmates call."""
        return self._due_epoch == self.epoch or self._samples_due

    def report_progress(self, samples: float, rate: float, step_s: float) -> None:
        """Say how far this peer's training is; cheap enough for every step.

        Args:
            samples: of this epoch so far, this peer's own.
            rate: samples per second.
            step_s: seconds per local step.
        """
        self.ensure()
        self._samples_due = 0 < self._target <= samples
        now = self.clock()
        at, before = self._reported
        ahead = samples - before
        if (
            now - at >= REPORT_INTERVAL_S
            or ahead < 0
            or ahead >= REPORT_SHARE * self._target
            or self._samples_due
        ):
            self._reported = (now, samples)
            # Between two reports the network assumes the rate to hold, for a step's length; so
            # that skipped reports do not look like a pause, a step lasts as long as they may.
            skipped_s = REPORT_SHARE * self._target / rate if rate > 0 else 0.0
            lasting_s = max(step_s, min(REPORT_INTERVAL_S, skipped_s + step_s))
            self._thread.post(self._driver.report_progress, samples, rate, lasting_s)

    def begin_averaging(
        self,
        vector: torch.Tensor,
        weight: float,
        *,
        codec: str = DEFAULT_CODEC,
        feedback: ErrorFeedback | None = None,
        in_place: bool = False,
        differences: bool = False,
        hidden_s: float = 0.0,
        exact_head: int = 0,
        fill_s: float | None = None,
        earlier: float = 0.0,
        merges: bool = False,
    ) -> Averaging:
        """Average a snapshot while training goes on. One at a time.

        Args:
            vector: float32, one-dimensional, on the CPU, as long as attached; must not be
                changed until the averaging has ended. What is not finite is refused by the others
                (strategies look for it before they say a weight).
            weight: this peer's mass: the samples behind the snapshot.
            codec: as for `average`.
            feedback: keeps what the codec loses, and adds it the next time; of this vector's
                length, and used for one averaging at a time.
            in_place: the mean takes the vector's place, so that no second one is needed.
            differences: these are gradients or differences, so that ``"auto"`` may compress harder.
            hidden_s: how long ``"auto"`` may let it take, as nobody waits for it.
            exact_head: so many numbers at the beginning lose nothing to the codec; the same
                for all peers.
            fill_s: the vector is complete only bit by bit, as `Averaging.ready` says, in about so
                many seconds, and so is the mean, see `Averaging.means`. All peers must do so: their
                chunks go in another order.
            earlier, merges: see `moshpit.protocol.machine.BeginAveraging`.

        Raises:
            LayoutError, ConfigError: a vector or weight that cannot be averaged.
            ClosedError: the swarm is closed.
        """
        if self._plan is None:
            raise LocalError("nothing is attached; call attach() first")
        if fill_s is not None and not self._began:
            # No target keeps who is first from going ahead alone.
            self._wait_for(all_attached, self._config.matchmaking.window_s_first)
        self._began = True
        job = Averaging(
            vector,
            self._plan if fill_s is None else self._plan.spread(),
            codec_or_auto(codec, differences=differences, hidden_s=hidden_s),
            in_place=in_place,
            feedback=feedback if weight > 0 else None,
            exact_head=exact_head,
            filled=None if fill_s is None else self._filled,
            fill_s=fill_s or 0.0,
            earlier=earlier,
            merges=merges,
            waiting=self._thread.waiting,
        )
        self._begin(job, vector, weight, self.epoch, always_weighs=False)
        return job

    def _begin(
        self,
        job: Averaging,
        vector: torch.Tensor,
        weight: float,
        epoch: int | None,
        *,
        always_weighs: bool,
    ) -> None:
        self.ensure()
        if not 0 <= weight < float("inf"):
            raise ConfigError(f"weight {weight}: must be finite and at least 0")
        if vector.shape != (self._numel,) or vector.dtype != torch.float32:
            raise ConfigError(
                f"vector of shape {tuple(vector.shape)} and {vector.dtype}: "
                f"expected ({self._numel},) and torch.float32, as attached"
            )
        self._due_epoch = -1
        self._samples_due = False
        self._thread.post(self._driver.begin, job, weight, self._schema, epoch, always_weighs)

    def _filled(self, job: Averaging) -> None:
        self._thread.post(self._driver.filled, job)

    def stats(self) -> SwarmStats:
        """Return what this peer has sent, received and averaged so far."""
        return self._driver.stats()

    # --- life -----------------------------------------------------------------------------

    def listen(self, listener: Callable[[Notice], None]) -> None:
        """Have a function called, in the network thread, with every `Notice`."""
        self._listeners.notice.append(listener)

    def ensure(self) -> None:
        """Raise what has ended this peer for good, if something has (`KeyInUseError`)."""
        if self._driver.failure is not None:
            raise self._driver.failure

    def leave(self) -> None:
        """Tell the others not to count on this peer any more, and do not wait. Rounds under way
        are still served; `close` ends everything."""
        self._thread.post(self._driver.handle, Leave())

    def close(self) -> None:
        """Leave: serve what groupmates still need, say goodbye, end the network thread.

        Idempotent. Called at the interpreter's exit if you don't.
        """
        with self._close_lock:
            if self._closed or os.getpid() != self._owner:
                return  # a forked child owns nothing of this
            self._closed = True
        atexit.unregister(self.close)
        try:
            self._thread.call(self._driver.close())
        except ClosedError:
            pass
        finally:
            self._thread.stop()

    def __enter__(self) -> Swarm:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"epoch {self.epoch}"
        return f"<Swarm {short(self.peer_id)} of run {short(self.run_id)}, {state}>"

    # --- the network thread calls these ---------------------------------------------------

    def _on_due(self, epoch: int) -> None:
        self._due_epoch = epoch
