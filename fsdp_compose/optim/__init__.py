"""Clipping, loss scaling, plain tensors for fast optimizers, optimizers of whole matrices.

Files, each importing only from those above it:

    mirror                 one gradient for a plain parameter and the sharded ones it is over
    plain_parameters       flat_parameters, local_parameters: plain tensors over the shards
    unaveraged_parameters  steps over sharded parameters and plain ones nobody averages
    state_cut              steps over state of another cut are refused before they write
    step_plan              which state goes into which list of a step, remembered
    slice_step             steps of torch's elementwise optimizers run on the slices themselves
    matrices               whole matrices at the ranks that own them, collected and returned
    gradients              gradients, those of a bucket as one tensor where they are one buffer
    scaler                 loss scaling whose ranks agree on overflow
    step_guard             a step that would train nothing, or on wrong values, raises
    fixed_sum              sums that have the same bits however numbers are cut over ranks
    norms                  norms of gradients over slices and ranks
    clip                   norms and clipping: the calls, and torch's own clipping
    owner_ranks            owners' ranks are given the same, and hear of each other's errors
    unread_matrices        values of matrices are not read while their optimizer is made
    owner_step             one rank has each matrix and computes its update once
"""
