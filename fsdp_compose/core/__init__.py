"""The engine: a unit's flat buffers, gathered and reduced by hooks around its forward.

Files, each importing only from those above it:

    guards/rank_differences     what ranks did differently, in words
    guards/compared_steps       steps of optimizers and other writes into parameters
    guards/guessed_use          what ranks take others to have used, until they compare it
    guards/collective_log       ranks compare what they communicate
    schedule                    when units are gathered, kept, released and reduced: plain rules
    records                     what a unit remembers besides its buckets
    guards/copied_units         a deep copy has buckets of its own
    state                       everything the library remembers, per module, unit and device
    guards/captured             units have anchors of the stream that a CUDA graph is captured on
    guards/left_memory          what others still read or write of weights is left to them
    guards/inner_gradients      gradients that forwards and hooks use while weights are gathered
    guards/moved_parameters     copies moved parameters back into their flat shards
    guards/gathered_memory      whether tensors lie in memory that a release frees
    guards/trained_entries      which parameters train now: not those frozen since the forward
    guards/weight_versions      whether weights were written since they were gathered
    guards/recurrent_weights    the second list of parameters that recurrent modules read
    guards/scope_parameters     a parameter inside a scope: same object, whole values
    guards/units                the units of a module, or of what it is a part of
    guards/recording_modes      forwards under modes that record or fake operators are refused
    gathering                   gathers and releases units, and sets what their modules read
    guards/replaced_parameters  parameters replaced since their unit was sharded
    guards/kept_tensors         backwards that begin at a tensor made inside a forward
    guards/kept_views           views of a gathered weight that outlive its release
    guards/compared_records     what was done to weights is compared before they leave the run
    guards/replicas             copies of a parameter on several ranks are compared
    guards/saved_tensors        saved-tensor hooks get activations, not gathered weights
    guards/unread_weights       units whose backward reads no weight stay released in it
    guards/microbatches         what cannot be added up in one tree over microbatches
    guards/parted_gradients     hooks get the sum of what a backward brings in two parts
    guards/used_parameters      which parameters any rank used: the others keep grad None
    guards/added_gradients      to which gradients a backward adds is compared between ranks
    guards/compared_reductions  how gradients are reduced is part of what ranks compare
    reducing                    packs gradients, reduces them, hands them to the parameters
    guards/compared_units       which units ranks compare; what is forgotten where they differed
    guards/divisors             units over different numbers of ranks
    guards/plain_gradients      gradients that an optimizer over plain parameters cleared
    guards/waiting_gradients    gradients that wait when a backward fails: dropped with a word
    guards/inner_parts          gradients that a backward inside another brings wait for the rest
    passes                      begins and ends a forward or backward pass
    guards/passed_units         units to which a backward brings no more gradients
    guards/frozen_units         where the backward of a unit that trains nothing ends
    guards/called_again         gradients of a unit's later calls are added up with the first's
    autograd                    gathering as a function; the one way for gradients to arrive
    guards/standing_views       parameters of forwards under no_grad that turn gradients on inside
    guards/static_buffers       units at fixed addresses take turns
    guards/added_parameters     parameters added to a unit since it was sharded
    guards/callers              threads, child processes and recorders that may not run a unit
    guards/connect              full tensors at hand, connected to the sharded parameters
    guards/surroundings         trainable parameters beside sharded ones
    guards/cut_graphs           gradients whose graph tensor parallelism would cut
    guards/inner_backward       backward that reaches a unit through an inner tensor
    guards/functional_calls     forwards on other tensors than the gathered parameters
    guards/hooked_weights       gradient hooks that a forward registers on gathered weights
    guards/forward_writes       weights written while a forward runs
    guards/order_changes        says when the order of units changed
    guards/partly_run           units of whose modules a forward left some out
    guards/interrupts           units whose forward was interrupted, and their gradients
    guards/failed_steps         what a failed step left is cleared before it is taken for more
    forward                     a unit's normal forward
    guards/cast_buffers         buffers follow the precision of a forward
    guards/other_forwards       forwards in scopes, functional, transformed, stored precision
    hooks                       what a module's forward triggers
    guards/methods              methods besides forward that gather their unit

Words, besides the field's own (gather, release, unit, bucket, shard, reduce, replicate):

- ``entry``: a parameter in a bucket: the caller's object, its slice, and its place
- ``full``: a bucket's gathered buffer; its storage holds 0 bytes while it is released
- ``hold``: a reason for which a unit stays gathered; a unit without any is released
- ``leaf``: a sharded parameter, which autograd accumulates into; modules hold it between passes
- ``alias``: a view of ``full``, which modules read in place of a leaf while the unit is gathered
- ``pass``: an outermost forward, or a backward, with all units that it runs
- ``engine``: what the units of one device share: streams, the schedule, what is under way
- ``task``: one run of autograd that reached a unit, from ``backward()`` to its end
- ``mode``: how one call of a module computes: normally, in a scope, functional, transformed
- ``fill``: what ``full`` was gathered from: a new one for each gather
- ``stamp``: a value that changes whenever a bucket's shard is written
- ``spread``: kept from forward to backward over fewer ranks than hold the shards
- ``handed out``: ``p.data`` gave the user an alias of a shard, whose writes autograd does not count
"""
