"""Programs that once failed, or that find a hole which random ones find rarely.

Where a seed is named, the fuzzer drew a larger program for it when it found the hole.
"""

from __future__ import annotations

from fsdp_compose.simulation import KillRank, LoseMessage

from fuzz_programs import HYBRID, Case, Leaf, Node

UNITS = Node(
    (
        Leaf("transposed"),
        Node((Leaf("matrix", unit=True), Leaf("scalar"), Leaf("matrix", tie=0)), True),
        Node((Leaf("low rank", frozen=True), Leaf("norm", dtype="float32")), True),
        Leaf("matrix", tie=1, unit=True),
    ),
    True,
)

PAIR = Node((Leaf("matrix"), Leaf("vector")))
TWO = Node((Node((Leaf("matrix"),), True), Node((Leaf("matrix"),), True)), True)
TIED = Node((Leaf("matrix"), Node((Leaf("matrix", tie=0), Leaf("matrix")), True)))

FOUND = {
    "seed 54: an error at the end of a backward leaves gathered weights in the modules": Case(
        Node((Leaf("matrix"), Node((Leaf("matrix"),), False, "reentrant"))), 2, "FULL_SHARD",
        (("freeze here", 0), ("step", 0)),
    ),
    "ranks that disagreed begin no reduction over the replicas afterwards": Case(
        UNITS, 2, "NO_SHARD", (("step", 0), ("freeze here", 1), ("step", 0)),
    ),
    "a skipped step where data travels over both axes": Case(
        UNITS, 4, "HYBRID_SHARD_OPTIMIZER", (("step", 0), ("skippable", 1), ("step", 0)),
    ),
    "seed 40710: a skipped first step, compared over all ranks, of data over both axes": Case(
        Node((Leaf("empty", dtype="float64"),)), 4, "HYBRID_SHARD_OPTIMIZER",
        (("skippable", 2), ("skippable", 1)),
    ),
    **{
        f"seed 10371: replicas hear of a disagreement of others ({how}, {seed})": Case(
            UNITS, 4, how, (*[("step", 0)] * seed, ("stray", 1), ("step", 0)),
        )
        for how in HYBRID for seed in (0, 1)
    },
    "seed 143019: what was gathered ahead in vain when a step was skipped": Case(
        Node((
            Node((Node((Leaf("low rank", dtype="float64", unit=True),)),)),
            Leaf("transposed", dtype="float64", unit=True),
        )), 2, "FULL_SHARD", (("two forwards", 0), ("skippable", 2)), prefetch=(2, 1),
    ),
    "seed 133448: what was gathered ahead in vain when ranks disagreed": Case(
        Node((Node((Leaf("matrix"),), True), Leaf("empty", dtype="float64", unit=True))), 2,
        "FULL_SHARD", (("two forwards", 0), ("stray", 0)), prefetch=(2, 1),
    ),
    "seed 148659: one rank runs what is kept, and gathers ahead in another order": Case(
        Node((
            Node((Leaf("low rank", dtype="float64", unit=True),), True),
            Leaf("matrix", dtype="float64"), Leaf("matrix", dtype="float64"),
        )), 2, "SHARD_GRAD_OP", (("swap", 4), ("stray", 0), ("gathered loss", 0)), prefetch=(2, 1),
    ),
    "a skipped step where a unit is spread over fewer ranks": Case(
        UNITS, 4, "FULL_SHARD", (("step", 0), ("skippable", 2), ("step", 0)), release=2,
    ),
    "data assigned, then a full state dict": Case(
        Node((Leaf("matrix"),)), 2, "FULL_SHARD", (("write data", 1), ("state", 0)),
    ),
    "tensors for one call after a backward that failed": Case(
        Node((Leaf("matrix"),)), 2, "FULL_SHARD", (("fail backward", 0), ("functional", 0)),
    ),
    "a gradient penalty leaves nothing gathered": Case(
        Node((Leaf("single", frozen=True),)), 2, "FULL_SHARD", (("penalty", 0),),
    ),
    "seed 149: a backward that fails where nothing was computed": Case(
        Node((Leaf("matrix"),), recompute="reentrant", calls=2), 2, "FULL_SHARD",
        (("skip", 0), ("fail backward", 0)),
    ),
    "seed 188: a step in which nothing was trained": Case(
        Node((Leaf("matrix"), Leaf("matrix"))), 2, "FULL_SHARD",
        (("skip", 0), ("toggle", 5), ("step", 0)),
    ),
    "every operation: a rank that skips a step takes the flags that others wait with": Case(
        UNITS, 2, "FULL_SHARD", (("toggle", 13), ("skip", 14), ("skippable", 43)),
    ),
    "every operation: flags from before a disagreement are not read after it": Case(
        UNITS, 2, "NO_SHARD",
        (("toggle", 13), ("skip", 14), ("stray", 37), ("freeze here", 39), ("debug", 44)),
    ),
    "every operation: what a failed step left is not put back by one that is skipped": Case(
        UNITS, 2, "FULL_SHARD", (("freeze here", 39), ("skippable", 43), ("step", 44)),
    ),
    "seed 20543: what a failed step left is not accumulated by a scope behind it": Case(
        UNITS, 2, "NO_SHARD", (("fail backward", 7), ("no_sync", 2)),
    ),
    "seed 222: ranks disagree about a gather while one waits for the next": Case(
        Node(
            (
                Leaf("empty", dtype="float32", unit=True),
                Leaf("vector", dtype="float32", frozen=True),
                Node((Node((Leaf("matrix", unit=True), Leaf("single", dtype="float32"),
                            Leaf("norm", unit=True)), recompute="reentrant"),)),
            ),
            True, calls=2,
        ),
        2, "FULL_SHARD", (("fail backward", 9), ("freeze here", 7)), prefetch=(1, 1),
        granularity="tensor",
    ),
    "seed 31642: a rank skips a step where others wait for a gather behind a reduction": Case(
        Node(
            (
                Node(
                    (
                        Leaf("single", tie=0),
                        Node((Leaf("transposed", frozen=True, unit=True), Leaf("low rank"),
                              Leaf("matrix", dtype="float32", unit=True))),
                        Leaf("vector"),
                    ),
                    True,
                ),
            ),
            calls=2,
        ),
        3, "FULL_SHARD", (("torch clip", 0), ("skippable", 11)), prefetch=(1, 3),
        granularity="row",
    ),
    "seed 128206: two buckets of a unit are under way where another rank skips": Case(
        Node((Node((Node((Leaf("matrix"), Leaf("scalar", dtype="float32")), True),)),), calls=2),
        2, "FULL_SHARD", (("step", 0), ("skippable", 4)),
    ),
    "seed 100568: ranks gather ahead alike after a skipped step": Case(
        Node((Leaf("single", unit=True),)), 2, "FULL_SHARD",
        (("skippable", 2), ("scope grad", 0)), prefetch=(1, 3),
    ),
    "seed 32158: units are gathered by name where ranks failed in other places": Case(
        Node(
            (
                Leaf("scalar", dtype="float32", frozen=True),
                Node((Leaf("matrix", unit=True), Leaf("scalar", unit=True),
                      Leaf("scalar", dtype="float32")), True, "reentrant"),
                Leaf("matrix", unit=True),
            )
        ),
        2, "SHARD_GRAD_OP", (("freeze here", 11), ("unshard", 1)), prefetch=(0, 0),
        granularity="tensor",
    ),
    "seed 20336: a frozen weight written between forward and backward": Case(
        Node((Leaf("norm"), Leaf("matrix", frozen=True, unit=True)), True), 2, "FULL_SHARD",
        (("write between", 3),), release=True,
    ),
    "seed 20518: a copy of an offloaded shard that inference made": Case(
        TWO, 2, "SHARD_GRAD_OP", (("inference", 9), ("step", 0), ("step", 0)),
        offload=("optimizer",),
    ),
    "seed 20338: refresh where a step failed before it": Case(
        TWO, 2, "FULL_SHARD", (("freeze here", 7), ("refresh", 5)),
    ),
    "seed 20314: a forward joins another, around one of another model": Case(
        Node((Leaf("vector"),), recompute="reentrant"), 2, "FULL_SHARD",
        (("skippable", 2), ("crossed", 3)),
    ),
    "seed 699: moved while a reduction of a failed backward was under way": Case(
        Node((Node((Leaf("matrix"),)), Node((Leaf("matrix"),), True))), 1, "FULL_SHARD",
        (("fail backward", 10), ("write data", 11), ("copy", 0)),
    ),
    "seed 2509: a reduction of a failed backward joins what replicas sum later": Case(
        Node((Node((Leaf("matrix"),)), Node((Leaf("low rank", unit=True), Leaf("empty", "float32",
        frozen=True))))), 2, "NO_SHARD", (("fail backward", 10), ("accumulate local", 0)),
        granularity="tensor", optimizer="adamw",
    ),
    **{
        f"seed 39: a lost message ({event}) where a collective is one call": Case(
            Node((Leaf("matrix"),)), 2, "FULL_SHARD", (("step", 0),), backend="nccl",
            fault=LoseMessage(0, event),
        )
        for event in (0, 4, 12)
    },
    **{
        f"seed 1167: kept ({how}), moved, gathered again, then written in a scope": Case(
            Node((Leaf("matrix"),)), 2, how,
            (("dropped", 0), ("write data", 1), ("functional", 0), ("edit", 0)),
        )
        for how in ("FULL_SHARD", "SHARD_GRAD_OP", "ZERO1")
    },
    **{
        f"seed 496: recomputed ({how}) from a scope, kept from a forward before it": Case(
            Node((Node((Leaf("matrix"),), True),), recompute=how), 2, "SHARD_GRAD_OP",
            (("dropped", 0), ("write data", 1), ("gathered loss", 0)),
        )
        for how in ("reentrant", "saved")
    },
    "seed 448963: flags that were sent before a rank froze a parameter are waited for": Case(
        Node((
            Leaf("norm", dtype="float32"), Leaf("transposed", dtype="float32"),
            Leaf("matrix", dtype="float64"),
        )), 2, "FULL_SHARD", (("toggle", 0), ("freeze here", 8)), prefetch=(0, 0),
    ),
    "seed 460846: a forward is tried again after one in which ranks differed": Case(
        Node((
            Node((Leaf("empty", dtype="float64"),), True),
            Node((Leaf("matrix", dtype="float64"),), True), Leaf("empty", dtype="float64"),
        )), 2, "FULL_SHARD", (("scope clip", 0), ("stray", 0)), prefetch=(0, 0),
    ),
    "seed 450710: as before, where weights are kept and were written": Case(
        Node((Leaf("matrix", dtype="float64"), Node((Leaf("matrix", dtype="float64"),), True))), 2,
        "SHARD_GRAD_OP", (("write late", 11), ("dropped", 0), ("stray", 0)), prefetch=(0, 0),
    ),
    "seed 451706: one gradient is cleared that waits for a sum over both axes": Case(
        Node((Leaf("matrix", dtype="float64"), Leaf("matrix", dtype="float64"))), 2,
        "HYBRID_SHARD_OPTIMIZER", (("one cleared", 7),), prefetch=(0, 0),
    ),
    "seed 710051: zeros that only a removed hook would have seen": Case(
        Node((Leaf("matrix"), Leaf("matrix"))), 2, "FULL_SHARD",
        (("hook after", 0), ("skip", 0), ("one cleared", 0)), prefetch=(0, 0), backend="nccl",
    ),
    "seed 477566: the norm of a gradient that waited and was converted": Case(
        Node((Leaf("matrix", dtype="float64"),)), 2, "FULL_SHARD",
        (("clip", 0), ("accumulate unsharded", 0), ("convert", 7), ("clip", 0)), prefetch=(0, 0),
    ),
    # Each finds a hole of tests/holes.
    "each rank multiplies a weight by a tensor of its own": Case(
        PAIR, 2, "FULL_SHARD", (("own operand", 0),),
    ),
    "each rank steps with a rate of its own": Case(PAIR, 2, "FULL_SHARD", (("own settings", 0),)),
    "each rank writes values of its own in a scope": Case(
        PAIR, 2, "FULL_SHARD", (("own edit", 0),),
    ),
    "each rank writes a parameter in its own way": Case(
        PAIR, 2, "FULL_SHARD", (("own write", 0),),
    ),
    "one rank clears its gradients": Case(PAIR, 2, "FULL_SHARD", (("own clear", 0),)),
    "memory is read without asking": Case(
        PAIR, 2, "FULL_SHARD", (("step", 0), ("read below", 0)),
    ),
    "one rank fails in a scope": Case(PAIR, 2, "FULL_SHARD", (("own edit", 2),)),
    "an interrupt is caught inside a forward": Case(TWO, 2, "FULL_SHARD", (("interrupt", 0),)),
    "gradients turned on inside": Case(PAIR, 2, "FULL_SHARD", (("enabled inside", 0),)),
    "a hook on a weight of two units": Case(TIED, 2, "FULL_SHARD", (("hook", 0),)),
    "backward of one weight of two units": Case(TIED, 2, "FULL_SHARD", (("inputs", 1),)),
    "clipping where a parameter has no gradient": Case(
        PAIR, 2, "FULL_SHARD", (("accumulate", 0), ("toggle", 0), ("clip", 0)),
    ),
    "a flag set in a scope": Case(PAIR, 2, "FULL_SHARD", (("scope clip", 2), ("step", 0))),
    "frozen on one rank": Case(PAIR, 2, "FULL_SHARD", (("freeze here", 0), ("step", 0))),
    "written through data while kept": Case(
        TWO, 2, "SHARD_GRAD_OP", (("dropped", 0), ("write data", 0), ("step", 0)),
    ),
    "a part of a unit is recomputed": Case(
        Node((Leaf("matrix"), Node((Leaf("matrix"),), recompute="saved"))), 2, "FULL_SHARD",
        (("step", 0),),
    ),
    "optimizers that list parameters in another order": Case(
        UNITS, 2, "FULL_SHARD", (("step", 0), ("optimizer state", 0), ("step", 0)),
        optimizer="adamw", reordered=True,
    ),
    "weights over both axes": Case(UNITS, 4, "HYBRID_SHARD_OPTIMIZER", (("step", 0), ("step", 0))),
    "written while spread": Case(
        UNITS, 4, "FULL_SHARD", (("step", 0), ("dropped", 0), ("write", 0), ("step", 0)), release=2,
    ),
    "copies drift": Case(UNITS, 2, "NO_SHARD", (("drift", 0),)),
    "a step is skipped": Case(UNITS, 2, "FULL_SHARD", (("step", 0), ("skippable", 1), ("step", 0))),
    "replicas write different values": Case(
        PAIR, 2, "NO_SHARD", (("step", 0), ("write inside", 2)),
    ),
    "a forward writes": Case(PAIR, 2, "FULL_SHARD", (("step", 0), ("write inside", 1))),
    "ranks start with other weights": Case(PAIR, 2, "FULL_SHARD", (("differ", 1),)),
    "one rank runs another unit": Case(
        UNITS, 2, "FULL_SHARD", (("step", 0), ("stray", 1), ("step", 0)),
    ),
    "nobody uses a parameter": Case(PAIR, 2, "FULL_SHARD", (("skip", 1), ("step", 0))),
    "one rank does not use a parameter": Case(
        PAIR, 2, "FULL_SHARD", (("skip here", 0), ("step", 0)),
    ),
    "weights are swapped": Case(TWO, 2, "FULL_SHARD", (("swap", 0), ("step", 0))),
    "a rank is killed while two buckets are gathered by one call": Case(
        Node((Leaf("matrix", dtype="float64"), Leaf("low rank", dtype="float64", frozen=True))), 2,
        "FULL_SHARD", (), fault=KillRank(1, 5), backend="nccl",
    ),
    "a message is lost while two buckets are gathered by one call": Case(
        Node((Leaf("matrix", dtype="float64"), Leaf("transposed", dtype="float32"))), 2,
        "FULL_SHARD", (("switch", 0),), prefetch=(0, 0), fault=LoseMessage(1, 13), backend="nccl",
    ),
    "seed 411775: in debug mode a rank skips a step, and others recompute a frozen unit": Case(
        Node((
            Node((Leaf("single", dtype="float64", frozen=True, unit=True),), False, "reentrant"),
            Leaf("matrix", dtype="float64"),
        )), 2, "NO_SHARD", (("debug", 0), ("skippable", 10)), prefetch=(0, 0),
    ),
    "seed 415625: a tied weight is kept by a unit, written, and shown by another": Case(
        Node((Leaf("norm", dtype="float64", unit=True), Leaf("norm", dtype="float64", tie=0))), 2,
        "FULL_SHARD", (("switch", 11), ("unshard", 0)), prefetch=(0, 0),
    ),
    "seed 420564: an undone unit lives on in what a caught error keeps, on some ranks": Case(
        Node((Leaf("matrix", dtype="float64"),)), 4, "FULL_SHARD",
        (("sharded twice", 0), ("dropped", 0), ("undo", 0)), prefetch=(1, 3),
    ),
    "gradients are cleared in no_sync, where a checkpoint brought them": Case(
        Node((Leaf("matrix", dtype="float64"),), False, "reentrant"), 2, "FULL_SHARD",
        (("cleared in no_sync", 1), ("step", 0)), prefetch=(0, 0),
    ),
    "seed 438962: gradients that wait are cleared beside one that does not": Case(
        Node((Leaf("matrix", dtype="float64"), Leaf("matrix", dtype="float64"))), 2, "FULL_SHARD",
        (("write late", 0), ("skip", 0), ("cleared in no_sync", 3)), prefetch=(0, 0),
    ),
    "seed 445908: weights that are kept are converted, and then written": Case(
        Node((Leaf("low rank", dtype="float32"),)), 2, "ZERO1", (("convert", 2), ("write", 0)),
        prefetch=(0, 0),
    ),
    "gradients are asked for in a scope": Case(TWO, 2, "FULL_SHARD", (("scope grad", 0),)),
    "a backward through gradients reads frozen weights": Case(
        Node((Leaf("scalar", unit=True), Leaf("low rank", frozen=True))), 2, "FULL_SHARD",
        (("second order", 0),), prefetch=(0, 0),
    ),
    "a scaler over groups whose parameters ranks list in other orders": Case(
        TWO, 4, "FULL_SHARD", (("scaler", 0),), prefetch=(0, 0), reordered=True,
        mixed="HYBRID_SHARD_OPTIMIZER",
    ),
    "seed 940461: a part of an ungathered unit runs again (reentrant)": Case(
        Node((Leaf("matrix", dtype="float64"),), False, "reentrant"), 2, "FULL_SHARD",
        (("switch", 9),), prefetch=(0, 0),
    ),
    "seed 942158: a part of an ungathered unit runs again (selective)": Case(
        Node((Leaf("matrix", dtype="float64"),), False, "selective"), 2, "FULL_SHARD",
        (("switch", 9),), prefetch=(0, 0),
    ),
    "weights are written while kept": Case(
        TWO, 2, "SHARD_GRAD_OP", (("dropped", 0), ("write", 0), ("step", 0)),
    ),
    "weights gathered ahead of a second forward are written unseen": Case(
        TWO, 2, "FULL_SHARD", (("two forwards", 0), ("write unseen", 0)), prefetch=(3, 0),
    ),
    "copies over the replicas are written unseen": Case(
        TWO, 4, "HYBRID_SHARD_OPTIMIZER", (("step", 0), ("write unseen", 0)),
    ),
    "copies of an offloaded optimizer's weights are written unseen": Case(
        TWO, 2, "FULL_SHARD", (("step", 0), ("write unseen", 0)), offload=("optimizer",),
    ),
    "what smaller groups keep for backward is written unseen": Case(
        TWO, 4, "FULL_SHARD", (("step", 0), ("write unseen", 1)), release=2,
    ),
    "a forward from before a backward that failed computes a part again": Case(
        Node((Node((Leaf("matrix"),), recompute="saved"),)), 2, "FULL_SHARD", (("between", 40),),
    ),
    "weights are written between two forwards that compute a part again": Case(
        Node((Node((Leaf("matrix", dtype="float64"),), recompute="reentrant"),)), 2, "FULL_SHARD",
        (("write unseen", 0),),
    ),
    "a unit is removed that has a tied weight": Case(
        Node((Leaf("matrix", unit=True), Leaf("matrix", tie=0))), 2, "FULL_SHARD",
        (("remove", 0), ("step", 0)),
    ),
}  # fmt: skip
