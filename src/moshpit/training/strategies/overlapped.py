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
vector, which every piece waits for: the fingerprint, and whether a gradient was not finite.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch.utils.hooks import RemovableHandle

from moshpit.errors import ConfigError, LocalError
from moshpit.tensors.reduce import is_finite
from moshpit.training.averager import Averaging
from moshpit.training.piecewise import GlobalStep, Needs, Piece, PiecewiseStep
from moshpit.training.strategies.base import Closure, Handle, Snapshot, Strategy
from moshpit.training.strategies.gradient_averaging import (
    check_fingerprint,
    norm_of,
    starting_schema,
)
from moshpit.training.tensors import (
    Named,
    buffers_of,
    fingerprint,
    first_nonfinite,
    parameters_of,
)

log = logging.getLogger("moshpit.training")

FIRST_FILL_S = 60.0  # guess: of the first backward pass nobody knows how long it takes
CALMER = 0.9  # guess: from step to step so much is left of what once took long


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
        self._agreement = torch.zeros(3)  # the fingerprint, and how much of the mass is spoiled
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._batches = 0
        self._gathered = 0.0  # the samples behind the sums
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
        self._fill_s = FIRST_FILL_S  # how long the vector takes to be complete
        self._begun_at: float | None = None
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
        place = {id(p): i for i, p in enumerate(self._model.parameters())}
        found = parameters_of(self.inner, self._model)
        strange = next((p.name for p in found if id(p.tensor) not in place), None)
        if strange is not None:
            raise ConfigError(
                f"the optimizer's parameter {strange} is not in the model, so nobody knows when "
                f"it is needed, as {self.name} has to"
            )
        return sorted(found, key=lambda p: place[id(p.tensor)])

    def layout(self) -> tuple[bytes, int]:
        schema, numel = super().layout()
        self._watch()
        return starting_schema(schema, self.parameters()), numel

    def _head(self) -> list[Named]:
        return [Named("agreement", self._agreement)]

    def _watch(self) -> None:
        """Find every tensor's place, and see to it that its gradient is taken."""
        assert self._model is not None
        parameters = self.parameters()
        at, pieces = self._agreement.numel(), list[Piece]()
        for named in (*buffers_of(self._model), *parameters):
            stop = at + named.tensor.numel()
            trained = named.tensor.requires_grad
            pieces.append(Piece(named.name, named.tensor, at, stop, trained))
            at = stop
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
        number = self._numbers[parameter]
        piece = self._pieces[number]
        if self._filling is None and self._using is not None and number in self._using.todo:
            self._late.add(number)
        if number in self._late:
            raise LocalError(
                f"{piece.name} was used in a forward pass before the last step had reached it: its "
                "module was not called. Call optimizer.flush() before you use parameters so"
            )
        if self._batches + 1 < self.accumulate:
            return
        step = self._filling or self._begin()
        if number in step.filled:
            raise LocalError(
                f"a second gradient of {piece.name} came before step(): call step() after each "
                "backward pass, with accumulate= for several to a step of the optimizer"
            )
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        self._fill(step, number, gradient)

    def _begin(self) -> GlobalStep:
        """Begin this step's averaging, when the last one's means are all in use."""
        handle = self._handle
        assert handle is not None, "connect() comes first"
        if self._using is not None:
            todo = set(self._using.todo)
            handle.flush()
            self._late = todo
        self._expected = handle.expected()
        handle.begin()
        assert self._filling is not None
        return self._filling

    def _fill(self, step: GlobalStep, number: int, gradient: torch.Tensor | None) -> None:
        """Write this peer's mean gradient of a piece into the vector, or a buffer."""
        piece = self._pieces[number]
        place = step.vector[piece.start : piece.stop].view(piece.tensor.shape)
        total = self._sums.get(piece.tensor) if piece.trained else None
        if not piece.trained:
            place.copy_(piece.tensor)
        elif gradient is None:
            place.zero_()
        else:
            place.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        if total is not None and step.weight > 0:
            place.mul_(step.samples).add_(total).div_(step.weight)
        if not is_finite(place):
            step.spoiled = piece.name
            place.zero_()
        step.filled.add(number)
        assert step.job is not None
        step.job.ready(piece.start, piece.stop)

    # --- step() -----------------------------------------------------------------------------

    def local_step(self, closure: Closure | None, samples: Callable[[], float]) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        count = samples()
        if self._batches + 1 < self.accumulate:
            self._add(count)
            return loss
        if self._filling is None:  # no parameter had a gradient
            self._begin()
        step = self._filling
        assert step is not None
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
        self._batches += 1
        parameters = self.parameters()
        gradients = [Named(p.name, p.tensor.grad) for p in parameters if p.tensor.grad is not None]
        bad = first_nonfinite(gradients)
        if bad is not None:
            log.warning("the gradient of %s is not finite: this batch is left out", bad)
            self.skip_batch()
            return
        for named in parameters:
            if named.tensor.grad is not None:
                self._sum_of(named.tensor).add_(named.tensor.grad, alpha=count)
            named.tensor.grad = None
        self.samples += count
        self._gathered += count

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
            step.vector[2] = 1.0
        assert step.job is not None
        step.job.ready(0, self._agreement.numel())
        step.settings = PiecewiseStep(self.inner)
        self._note_pace(step)
        for total in self._sums.values():
            total.zero_()
        self._batches, self._gathered = 0, 0.0
        self._late.clear()
        self._filling, self._using = None, step
        if self._needs is not None and not self._needs.learned:
            # What is unused and unseen can wait; should it be used some day, `_late` tells.
            self._everywhere = [n for n in self._needs.learn() if n in used]
        if self._everywhere:
            self._use(self._everywhere)

    def _note_pace(self, step: GlobalStep) -> None:
        """The vector is complete: the next one takes about as long."""
        if step.early and self._handle is not None and self._begun_at is not None:
            took_s = self._handle.swarm.clock() - self._begun_at
            known = self._fill_s != FIRST_FILL_S
            self._fill_s = max(took_s, CALMER * self._fill_s) if known else took_s

    @property
    def filled(self) -> bool:
        return self._filling is None

    def snapshot(self) -> Snapshot:
        """Begin a step: early, with a vector that fills in the backward pass, or with what earlier
        batches have left."""
        numel = self._pieces[-1].stop
        vector, self._spare = self._spare, None
        if vector is None or vector.numel() != numel:
            vector = torch.empty(numel, dtype=torch.float32)
        expected, self._expected = self._expected, None
        early, samples = expected is not None, expected or 0.0
        bad = (
            None
            if early
            else first_nonfinite([Named(p.name, self._sum_of(p.tensor)) for p in self.parameters()])
        )
        if bad is not None:
            self._sums.clear()
            self._gathered = 0.0
        todo = dict.fromkeys(range(len(self._pieces)))
        self._filling = GlobalStep(
            vector, self._gathered + samples, samples, early=early, todo=todo
        )
        exact = self._before_main()
        fill_s = self._fill_s if early else 0.0
        snapshot = Snapshot(
            vector, self._filling.weight, bad, codec=self.codec, exact_head=exact, fill_s=fill_s
        )
        return self._as_differences(snapshot)

    def begun(self, averaging: Averaging) -> None:
        step = self._filling
        assert step is not None
        step.job = averaging
        self.samples = 0.0
        self._begun_at = self._handle.swarm.clock() if self._handle is not None else None
        # While the peers meet there is time for it.
        self._agreement[:2] = fingerprint(self.parameters())
        step.vector[:2] = self._agreement[:2]
        step.vector[2] = 0.0
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
        for number in wanted:
            if not step.skipped:
                self._take(step, self._pieces[number], gradients)
            del step.todo[number]
        if gradients:
            assert step.settings is not None
            step.settings.step(gradients)
        if self._handle is not None:
            self._handle.waited(started)

    def _take(
        self, step: GlobalStep, piece: Piece, gradients: dict[torch.Tensor, torch.Tensor]
    ) -> None:
        assert step.job is not None
        mean = step.job.means(piece.start, piece.stop).view(piece.tensor.shape)
        if not piece.trained:
            piece.tensor.copy_(mean)
            return
        gradient = torch.empty_like(piece.tensor)
        gradient.copy_(mean if step.scale == 1 else mean * step.scale)
        if not is_finite(gradient):
            log.warning("the mean gradient of %s overflows: no peer changes it", piece.name)
        elif bool(gradient.any().item()):  # what nobody used has no gradient
            gradients[piece.tensor] = gradient

    def _judge(self, step: GlobalStep) -> None:
        """Look at what all peers must agree on, once for each step."""
        if step.judged:
            return
        assert step.job is not None
        first = step.job.means(0, self._agreement.numel())
        if step.weight == 0:  # perhaps nobody had anything
            rounds = step.job.wait().rounds
            step.skipped = not any(mass > 0 for r in rounds for mass in r.masses)
        if not step.skipped:
            check_fingerprint(first[:2], self._agreement[:2])
            if bool((first[2] > 0).item()):
                step.skipped = True
                self.skipped_steps += 1
                log.warning("a gradient is not finite, here or at another peer: all skip this step")
            elif self.max_grad_norm is not None:
                start = self._before_main()
                norm = norm_of(step.job.means(0, self._pieces[-1].stop)[start:])
                step.scale = min(1.0, self.max_grad_norm / max(norm, 1e-30))
        step.judged = True

    def _use_rest(self) -> None:
        if self._using is not None:
            self._use(list(self._using.todo))
        self._using = None

    def adopt(self, snapshot: Snapshot, mean: torch.Tensor) -> None:
        self._use_rest()

    def keep_local(self, snapshot: Snapshot) -> None:
        self._use_rest()

    def overflowed(self, snapshot: Snapshot) -> None:
        self._use_rest()

    # --- state ------------------------------------------------------------------------------

    def _flush(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.flush()

    def _sum_of(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter not in self._sums:
            self._sums[parameter] = torch.zeros_like(parameter, dtype=torch.float32)
        return self._sums[parameter]

    def state_dict(self) -> dict[str, Any]:
        sums = {p.name: self._sums[p.tensor] for p in self.parameters() if p.tensor in self._sums}
        sums = {name: total.clone() for name, total in sums.items()}
        gathered = {"batches": self._batches, "gathered": self._gathered}
        return {**super().state_dict(), **gathered, "gradient_sums": sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._batches = min(int(state["batches"]), self.accumulate - 1)
        self._gathered = float(state["gathered"])
        self._sums.clear()
        for named in self.parameters():
            if named.name in state["gradient_sums"]:
                self._sum_of(named.tensor).copy_(state["gradient_sums"][named.name])
