"""What the memory of a training engine on one rank consists of, whichever engine it is."""

from __future__ import annotations

from dataclasses import dataclass

from quadriga.engines.memory.passes import PassMemory
from quadriga.engines.memory.traffic import NO_TRAFFIC, Traffic


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of a training engine on one rank, on its device.

    Attributes:
        parameters: the parameter shards, with buffers.
        optimizer: the moments.
        on_host: parameters, gradients and moments that are in host memory instead.
        kept: gradients that exist all the time.
        gathered: whole parameters in the compute dtype, as many as exist at once.
        gradients: as many as exist at once, beside `kept`.
        buffers: what the collectives of FSDP allocate, as much as exists at once.
        update: of a micro-batch with gradients. None: the engine is not trained.
        evaluate: of a micro-batch without gradients. None: there is no such pass.
        backward_peak: what forward and backward passes add to parameters and moments.
        step_peak: what the update of the parameters adds to them after that.
        evaluate_peak: what a pass without gradients adds.
        weights, largest_weight: elements of all parameters, and of the largest.
        adapted, frozen, trained: elements of the weights that have adapters, of other frozen ones,
            and of trained ones. Adapters are in none of them.
        uncounted: why activations are not in the numbers; "" if they are.
        sent: what the rank sends for FSDP.
    """

    parameters: int
    optimizer: int
    gathered: int
    gradients: int
    buffers: int
    update: PassMemory | None
    evaluate: PassMemory | None
    backward_peak: int
    step_peak: int
    evaluate_peak: int
    weights: int
    largest_weight: int
    adapted: int = 0
    frozen: int = 0
    trained: int = 0
    uncounted: str = ""
    on_host: int = 0
    kept: int = 0
    sent: Traffic = NO_TRAFFIC

    @property
    def update_peak(self) -> int:
        """What an optimizer step adds to parameters and moments."""
        return max(self.backward_peak, self.step_peak)

    @property
    def states(self) -> int:
        """Parameters, moments and gradients: what a smaller micro-batch does not reduce."""
        return self.parameters + self.optimizer + self.gradients + self.kept
