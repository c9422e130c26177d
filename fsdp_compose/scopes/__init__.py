"""What users call between passes: full parameters for a while, switches, hooks, pipelines.

Files, each importing only from those above it:

    surgery      surgery inside a scope is kept whole or not at all
    unshard      unshard, reshard, reduce_grads, prefetch_units
    gathered     full parameters for a block of code, and streams of them
    apply        nn.Module.apply on full parameters
    compile      units inside a compiled graph
    asked        gradients of chosen parameters, asked for by name
    comm_hooks   how a unit's packed gradients are reduced, by the user's choice
    participate  a rank that skips a unit joins what the others communicate
    switches     when gradients are reduced and units released
    pipeline     stages of torch.distributed.pipelining
    prefetch     which unit is gathered ahead of which
"""
