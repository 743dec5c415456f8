"""Average gradients while they are computed, and use the means while the next pass runs.

The idea is DeAR's (Zhang et al. 2023, *Decoupling the All-Reduce Primitive for Accelerating
Distributed Deep Learning*): what is communicated during the backward pass are the contributions
and means of layers that are done, and during the next forward pass the means of layers that are not
needed yet. A step takes as long as the computing or the communicating, not as both.

Theory of operation. The averaging is begun by the first gradient of the backward pass, with a
vector that fills as gradients become final (`Averaging.ready`). ``step()`` fills the rest, and
returns. Before a module's forward pass its own parameters' means are awaited, and the wrapped
optimizer makes its step for these only (`PiecewiseStep`). What nobody needed is done before the
next averaging begins. Everything that all peers must agree on is in the first numbers of the
vector, which every piece waits for: the fingerprint, whether a gradient was not finite, and whether
these are gradients at all.

Where parameters have parted, they are averaged in the place of gradients (`ParameterMerge`), and
then the optimizer's statistics, in ``step()``, which waits for it. A peer that is behind fetches
the swarm's state, also in ``step()``. The gradients of the backward pass that has found out are
worth nothing in both cases: they are dropped, with the samples behind them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, final

import torch
from torch.utils.hooks import RemovableHandle

from moshpit.errors import ConfigError, LocalError
from moshpit.events import EpochReport
from moshpit.training.averager import Averaging
from moshpit.training.piecewise import (
    FillPace,
    GlobalStep,
    Needs,
    Piece,
    PiecewiseStep,
    in_order_of,
    pieces_of,
)
from moshpit.training.strategies.accord import NUMBERS, Accord
from moshpit.training.strategies.base import Closure, Handle, Snapshot, Strategy
from moshpit.training.strategies.gathering import Gathered
from moshpit.training.strategies.gradient_averaging import norm_of, starting_schema
from moshpit.training.tensors import Named, parameters_of

log = logging.getLogger("moshpit.training")


@final
class OverlappedGradientAveraging(Strategy):
    r"""Average gradients during the backward pass, and use the means during the next forward pass.

    As `GradientAveraging`, all peers make the same steps from the same parameters, with the mean
    gradient of all; but communication takes no time of its own, as long as it takes less than
    the computing. A step is made of ``accumulate`` batches of every peer: ``step()`` is called
    after each backward pass, and returns at once.

    Parameters change later than in a usual loop: each just before the next forward pass of the
    module that needs it. ``model.state_dict()``, ``optimizer.state_dict()`` and ``finish()`` wait
    for all of them; before you read parameters in any other way, call ``optimizer.flush()``.
    The wrapped optimizer's settings, such as a learning rate, are those at the time of ``step()``.

    The backward pass takes the gradients: ``.grad`` is None after it. So gradients cannot be
    clipped or changed in between (see ``max_grad_norm``), `torch.amp.GradScaler` is refused (use
    bfloat16), and there is one backward pass for each ``step()``. A gradient that is not finite at
    one peer makes all peers skip the step.

    Who is behind fetches the swarm's state in ``step()``, and peers whose parameters have parted
    merge them there, as with `GradientAveraging`; the batch at hand is left out.

    Args:
        accumulate: batches of this peer for each step; peers may differ.
        max_grad_norm: clip the averaged gradient to this norm. Then nothing is used before
            everything is there, so that communication overlaps with the backward pass only.
        codec: as of `GradientAveraging`.

    Example:
        >>> OverlappedGradientAveraging(accumulate=4).overlap
        True

    Source: Zhang et al. 2023 (DeAR).
    """

    name = "OverlappedGradientAveraging"
    same_parameters = True
    begins_itself = True

    def __init__(
        self,
        accumulate: int = 1,
        *,
        max_grad_norm: float | None = None,
        codec: str = "float32",
    ) -> None:
        super().__init__(1.0, overlap=True, codec=codec)
        self.samples_per_epoch = 0.0  # an averaging begins when this peer's batches are there
        if accumulate < 1:
            raise ConfigError(f"accumulate: {accumulate!r}; give a number of batches, 1 or more")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm: {max_grad_norm!r}; give a positive number or None")
        self.accumulate = accumulate
        self.max_grad_norm = max_grad_norm
        self.skipped_steps = 0
        """Steps that all peers have skipped because something was not finite."""
        self._accord = Accord()
        self._merge = self._accord.merge
        self._useless = False  # the gradients of this backward pass
        self._gathered = Gathered()
        self._heard: EpochReport | None = None
        self._pieces: list[Piece] = []
        self._numbers: dict[torch.Tensor, int] = {}
        self._hooked: dict[torch.Tensor, RemovableHandle] = {}
        self._needs: Needs | None = None
        self._handle: Handle | None = None
        self._filling: GlobalStep | None = None
        self._using: GlobalStep | None = None
        self._late: set[int] = set()
        self._everywhere: list[int] = []
        self._expected: float | None = None
        self._pace = FillPace()
        self._saving: RemovableHandle | None = None

    # --- what there is ----------------------------------------------------------------------

    def bind(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
        if model is None:
            raise ConfigError(
                f"{self.name} has to know which parameters a forward pass needs next: "
                "moshpit.Optimizer(..., model=model)"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(f"LBFGS makes no step in pieces, as {self.name} needs it")
        super().bind(optimizer, model)
        self.parameters()
        self._saving = model.register_state_dict_pre_hook(  # pyright: ignore[reportUnknownMemberType]
            self._flush
        )

    def connect(self, handle: Handle) -> None:
        self._handle = handle

    def close(self) -> None:
        for hook in self._hooked.values():
            hook.remove()
        if self._needs is not None:
            self._needs.close()
        if self._saving is not None:
            self._saving.remove()

    def parameters(self) -> list[Named]:
        """The parameters that are trained, in the order of the model's modules: about the
        order in which a forward pass needs them."""
        assert self._model is not None
        return in_order_of(self._model, parameters_of(self.inner, self._model), self.name)

    def layout(self) -> tuple[bytes, int]:
        schema, numel = super().layout()
        self._watch()
        return starting_schema(schema, self.parameters()), numel

    def _head(self) -> list[Named]:
        return self._accord.tensors

    @property
    def replays(self) -> bool:
        return True

    @property
    def merges(self) -> bool:
        return True

    def merge(self, past: float) -> None:
        super().merge(past)
        self._merge.begin()

    @property
    def halfway(self) -> bool:
        return self._merge.begun

    @property
    def reunites(self) -> bool:
        return self._merge.under_way and not self._merge.begun

    @property
    def settled(self) -> bool:
        return not self._merge.under_way

    @property
    def fresh(self) -> float:
        return self._gathered.samples + (self._expected or 0.0)

    def _watch(self) -> None:
        """Find every tensor's place, and see to it that its gradient is taken."""
        assert self._model is not None
        parameters = self.parameters()
        pieces = pieces_of(self._model, parameters, NUMBERS)
        if [id(p.tensor) for p in pieces] == [id(p.tensor) for p in self._pieces]:
            return
        self._pieces = pieces
        self._numbers = {piece.tensor: i for i, piece in enumerate(self._pieces)}
        if self._needs is not None:
            self._needs.close()
        self._needs = Needs(self._model, [p.tensor for p in self._pieces], self._use)
        for named in parameters:
            if named.tensor not in self._hooked:
                self._hooked[named.tensor] = named.tensor.register_post_accumulate_grad_hook(  # pyright: ignore[reportUnknownMemberType]
                    self._gradient_came
                )

    # --- the backward pass ------------------------------------------------------------------

    @torch.no_grad()
    def _gradient_came(self, parameter: torch.Tensor) -> None:
        if self._useless:
            parameter.grad = None
            return
        number = self._numbers[parameter]
        piece = self._pieces[number]
        if self._filling is None and self._using is not None and number in self._using.todo:
            self._late.add(number)
        if number in self._late:
            raise LocalError(
                f"{piece.name} was used in a forward pass before the last step had reached it: its "
                "module was not called. Call optimizer.flush() before you use parameters so"
            )
        if self._gathered.batches + 1 < self.accumulate:
            return
        step = self._filling or self._begin()
        if step is None:
            self._useless, parameter.grad = True, None
            return
        if number in step.filled:
            raise LocalError(
                f"a second gradient of {piece.name} came before step(): call step() after each "
                "backward pass, with accumulate= for several to a step of the optimizer"
            )
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        self._fill(step, number, gradient)

    def _begin(self) -> GlobalStep | None:
        """Begin this step's averaging, when the last one's means are all in use. None: this peer
        has no gradients of use, as its parameters are not, or were not, the others'."""
        handle = self._handle
        assert handle is not None, "connect() comes first"
        if self._using is not None:
            todo = set(self._using.todo)
            handle.flush()
            self._late = todo
        if handle.behind():
            return None
        self._expected = handle.expected()
        handle.begin()
        return self._filling

    def _fill(self, step: GlobalStep, number: int, gradient: torch.Tensor | None) -> None:
        """Write this peer's mean gradient of a piece into the vector, or a buffer."""
        piece = self._pieces[number]
        total = self._gathered.known(piece.tensor) if piece.trained else None
        step.fill(number, piece, gradient, total)

    # --- step() -----------------------------------------------------------------------------

    def local_step(self, closure: Closure | None, samples: Callable[[], float]) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        count = samples()
        if self._gathered.batches + 1 < self.accumulate:
            self._add(count)
            return loss
        step = self._filling
        if step is None and not self._useless:  # no parameter had a gradient
            step = self._begin()
        if step is None:
            self._gathered.clear()
            self._useless = False
            self._reunite()
            return loss
        if count != step.samples:
            raise ConfigError(
                f"step(samples={count:g}), but the averaging began with {step.samples:g}, during "
                "the backward pass: give Optimizer(batch_size=...), or call "
                "zero_grad() and step() so that only this step's forward passes are counted"
            )
        self.samples += count
        self._complete(step)
        return loss

    @torch.no_grad()
    def _add(self, count: float) -> None:
        """Take a batch that is not the last one of its step."""
        if self._gathered.add(self.parameters(), count):
            self.samples += count
        else:
            self.skip_batch()

    def _reunite(self) -> None:
        """Wait until parameters that have parted are one again, if that is under way, and then what
        the optimizer keeps of them."""
        handle = self._handle
        assert handle is not None, "connect() comes first"
        handle.flush()
        while self.halfway:
            handle.begin()
            handle.flush()

    def skip_batch(self) -> None:
        super().skip_batch()
        for named in self.parameters():
            named.tensor.grad = None

    @torch.no_grad()
    def _complete(self, step: GlobalStep) -> None:
        """Fill what is left of the vector; from here on it is the network's."""
        used = [number for number in step.filled if self._pieces[number].trained]
        for number in range(len(self._pieces)):
            if number not in step.filled:
                self._fill(step, number, None)
        if step.spoiled:
            log.warning("%s is not finite: all peers skip this step", step.spoiled)
            self._accord.spoil(step.vector)
        assert step.job is not None
        step.job.ready(0, NUMBERS)
        step.settings = PiecewiseStep(self.inner)
        if step.early and self._handle is not None:
            self._pace.complete(self._handle.swarm.clock())
        self._gathered.clear()
        self._late.clear()
        self._filling, self._using = None, step
        if self._needs is not None and not self._needs.learned:
            # What is unused and unseen can wait; should it be used some day, `_late` tells.
            self._everywhere = [n for n in self._needs.learn() if n in used]
        if self._everywhere:
            self._use(self._everywhere)

    @property
    def filled(self) -> bool:
        return self._filling is None

    def snapshot(self) -> Snapshot:
        """Begin a step: early, with a vector that fills in the backward pass, or with what earlier
        batches have left."""
        if self._merge.under_way:
            return self._of_parameters()
        numel = self._pieces[-1].stop
        vector, self._spare = self._spare, None
        if vector is None or vector.numel() != numel:
            vector = torch.empty(numel, dtype=torch.float32)
        expected, self._expected = self._expected, None
        early, samples = expected is not None, expected or 0.0
        bad = None if early else self._gathered.nonfinite(self.parameters())
        todo = dict.fromkeys(range(len(self._pieces)))
        self._filling = GlobalStep(
            vector, self._gathered.samples + samples, samples, early=early, todo=todo
        )
        self._accord.gave = self._filling.weight
        exact = self._before_main()
        fill_s = self._pace.seconds if early else 0.0
        snapshot = Snapshot(
            vector, self._filling.weight, bad, codec=self.codec, exact_head=exact, fill_s=fill_s
        )
        return self._as_differences(snapshot)

    def _of_parameters(self) -> Snapshot:
        """Return parameters, or what the optimizer keeps of them: complete, as ever."""
        self.samples, self._expected = self.fresh, None
        self._accord.note(self.parameters())
        taken = self._collect_parted(self._merge)
        todo = dict.fromkeys(range(len(self._pieces)))
        self._using = GlobalStep(
            taken.vector, taken.weight, 0.0, early=False, todo=todo, merges=True
        )
        return replace(taken, fill_s=0.0)

    def begun(self, averaging: Averaging) -> None:
        step = self._filling or self._using
        assert step is not None
        step.job = averaging
        self.samples = 0.0
        if step.merges:
            self._late.clear()
            averaging.ready(0, step.vector.numel())
            return
        if self._handle is not None:
            self._pace.begun(self._handle.swarm.clock())
        # While the peers meet there is time for it.
        self._accord.note(self.parameters())
        self._accord.write(step.vector)
        if not step.early:
            self._complete(step)

    # --- the means --------------------------------------------------------------------------

    @torch.inference_mode(mode=False)  # the pass may be an evaluation
    @torch.no_grad()
    def _use(self, numbers: Iterable[int]) -> None:
        """Make the step for some pieces, as soon as their means are here."""
        step = self._using
        wanted = [] if step is None else [n for n in numbers if n in step.todo]
        if step is None or not wanted:
            return
        started = self._handle.swarm.clock() if self._handle is not None else 0.0
        self._judge(step)
        gradients: dict[torch.Tensor, torch.Tensor] = {}
        if step.merges and not step.skipped:
            self._take_parameters(step)
            wanted = list(step.todo)
        for number in wanted:
            if not (step.skipped or step.merges):
                step.take(self._pieces[number], gradients)
            del step.todo[number]
        if gradients:
            assert step.settings is not None
            step.settings.step(gradients)
        if self._handle is not None:
            self._handle.waited(started)

    def _take_parameters(self, step: GlobalStep) -> None:
        """What is here are parameters that have parted, or statistics: of all, now."""
        mean = step.means(0, step.vector.numel())
        first = mean[:NUMBERS].clone()
        self._write_parted(self._merge, mean)
        self._accord.taken(self.inner, self.parameters(), first)

    def _judge(self, step: GlobalStep) -> None:
        """Look at what all peers must agree on, once for each step."""
        if step.judged:
            return
        if self._accord.judge(step):
            self.skipped_steps += 1
        elif self.max_grad_norm is not None and not (step.skipped or step.merges):
            start = self._before_main()
            norm = norm_of(step.means(0, self._pieces[-1].stop)[start:])
            step.scale = min(1.0, self.max_grad_norm / max(norm, 1e-30))
        step.judged = True

    def _use_rest(self) -> None:
        if self._using is not None:
            self._use(list(self._using.todo))
        self._using = None

    def accepts(self, mean: torch.Tensor, report: EpochReport) -> bool:
        self._heard = report
        return True

    def adopt(self, snapshot: Snapshot, mean: torch.Tensor) -> None:
        step = self._filling or self._using
        if step is not None and step.new:  # heard while this peer's state was on its way
            assert self._heard is not None, "accepts() comes first"
            self._accord.note(self.parameters())
            step.heard, step.settings = (mean, self._heard), PiecewiseStep(self.inner)
            self._filling, self._using = None, step
        self._use_rest()

    def keep_local(self, snapshot: Snapshot) -> None:
        if self._using is not None and self._using.merges:  # there is nobody
            self._merge.end()
            self._using = None
        self._use_rest()

    def overflowed(self, snapshot: Snapshot) -> None:
        self._use_rest()

    # --- state ------------------------------------------------------------------------------

    def _flush(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.flush()

    def taken_over(self) -> None:
        super().taken_over()
        self._gathered.clear()
        self._merge.end()
        self._late.clear()
        self._useless = False
        self._filling = self._using = self._expected = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self._gathered.state_dict(self.parameters())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._gathered.load_state_dict(state, self.parameters(), self.accumulate - 1)
