"""The classes of fault: what each does to the output, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FaultClass:
    """A class of fault.

    Attributes
    ----------
    class_id
        Its stable name.
    title
        What it is.
    effect
        What it does to the output.
    cure
        What to do.
    """

    class_id: str
    title: str
    effect: str
    cure: str


_RELOAD = "Load the weights again by the fixed loader (gptoss_debug.sync), or restart the engine."

CLASSES: dict[str, FaultClass] = {
    fault.class_id: fault
    for fault in (
        FaultClass(
            "B1",
            "bias in another layout than the kernel reads",
            "text that begins well and turns to garbage; shapes, sums and norms are right, only the order is not",
            "Permute the bias once after each load, as the repack does. " + _RELOAD,
        ),
        FaultClass(
            "B2",
            "weight or scale in another layout than the kernel reads",
            "garbage from the first token, or a shape mismatch",
            "Repack after each load, exactly once. " + _RELOAD,
        ),
        FaultClass(
            "B3",
            "gate and up rows in another order",
            "scores near zero without an error: SwiGLU takes gates for values",
            "GPT-OSS interleaves them: row 2i is gate i, row 2i+1 is up i. " + _RELOAD,
        ),
        FaultClass(
            "C1",
            "padding is not zero",
            "NaN, a single token for ever, or drift that differs from run to run",
            "Zero the layer before loading into it. " + _RELOAD,
        ),
        FaultClass("C2", "another padding than the kernel expects", "a crash, or garbage", _RELOAD),
        FaultClass(
            "D1",
            "another rank's share",
            "an error that grows with the number of ranks",
            "Cut gate_up like its rows; add the down bias on the first rank only. " + _RELOAD,
        ),
        FaultClass(
            "D3",
            "another expert's, or another layer's, values",
            "wrong answers wherever the router chooses these experts",
            "Check the expert map and the order of the trainer's export. " + _RELOAD,
        ),
        FaultClass(
            "E1",
            "never written",
            "the experts contribute nothing, or noise",
            "Send every tensor; check the names. " + _RELOAD,
        ),
        FaultClass(
            "E2",
            "old values kept",
            "the answers of two models mixed; KL grows with every step",
            "A write went past the loader into a temporary. " + _RELOAD,
        ),
        FaultClass(
            "I1",
            "values converted wrongly",
            "from a steady gap to NaN",
            "Check the cast or quantiser between trainer and engine. " + _RELOAD,
        ),
    )
}
