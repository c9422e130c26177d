"""The engine: a unit's flat buffers, gathered and reduced by hooks around its forward.

Files, each importing only from those above it:

    bucket                    parameters in one flat buffer, with every view of it that a step needs
    guards/collective_log     ranks compare what they communicate (D2)
    order                     the order in which units run: recorded and followed
    schedule                  when units are gathered, kept, released and reduced
    records                   what a unit remembers besides its buckets
    state                     everything the library remembers, per module, unit and device
    guards/units              the units of a module, or the error that it has none
    guards/moved_parameters   takes over what was done to parameters between passes
    gathering                 gathers and releases units, and sets what their modules read
    guards/kept_views         views of a gathered weight that outlive its release
    guards/replicas           copies of a parameter on several ranks are compared
    guards/saved_tensors      saved-tensor hooks get activations, not gathered weights
    guards/used_parameters    which parameters any rank used: the others keep grad None
    guards/scope_parameters   a parameter inside a scope: same object, whole values
    reducing                  packs gradients, reduces them, hands them to the parameters
    passes                    begins and ends a forward or backward pass
    receiving                 the one way for gradients to arrive at their parameters
    autograd                  gathering as a differentiable function
    guards/added_parameters   parameters added to a unit since it was sharded (D5)
    guards/callers            threads, forks and recorders that may not run a unit
    guards/connect            full tensors at hand, connected to the sharded parameters
    guards/surroundings       trainable parameters beside sharded ones (D18)
    guards/inner_backward     backward that reaches a unit through an inner tensor
    guards/functional_calls   forwards on other tensors than the gathered parameters
    guards/forward_writes     weights written while a forward runs (D16)
    forward                   a unit's normal forward
    guards/other_forwards     forwards in scopes, functional, transformed, stored precision
    hooks                     what a module's forward triggers
    guards/methods            methods besides forward that gather their unit
"""
