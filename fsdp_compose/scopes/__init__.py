"""What users call between passes: full parameters for a while, switches, hooks, pipelines.

Files, each importing only from those above it:

    module_edits      modules that were edited inside a scope are kept whole or put back
    unshard           unshard, reshard, reduce_grads, prefetch_units
    unreduced         what .grad is while gradients wait to be reduced
    pending           the gradients that wait to be reduced, to look at
    open_scope        opens units for a scope: what modules and parameters hold in it
    compared_edits    what ranks write in a scope is the same, or nothing is written
    gathered          full parameters for a block of code
    stream            streams of full parameters
    apply             nn.Module.apply on full parameters
    compile           units inside a compiled graph
    chosen_gradients  autograd.grad and backward(inputs=) for parameters of scopes and graphs
    comm_hooks        how a unit's packed gradients are reduced, by the user's choice
    participate       a rank that skips a unit joins what the others communicate
    switches          when gradients are reduced and units released
    skippable         a step that every rank discards when one of them cannot use its batch
    pipeline          stages of torch.distributed.pipelining
    prefetch          which unit is gathered ahead of which, as the user lists them
"""
