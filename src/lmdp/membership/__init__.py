"""The instrument that risk and audit share: how well an adversary who sees a representation tells members from others.

examples          members and non-members: in content order, balanced, checked for overlap
representations   every layer's representation of every example, in one streaming pass
served            what a service would give out of a layer
compaction        from what a layer gives out to a row of bounded width
evidence          what an adversary is shown of each example, and what it gives back
attacks/          one table of attack families
metrics           how well scores tell members from non-members, with intervals
leak              what an attack achieved, as the value that risk profiles and audits are made of
crossfit          every example is scored by an adversary that was neither fitted nor chosen on it
workers           folds of layers side by side, each on one thread, with the same results on any number of them
calibration       with several models: judge an example's score by its own scores under the others
instrument        all of it for one model: layers, the output as reference, controls
together          an adversary who has the whole model: all layers, and the gradients of an example
references        a model beside others of which it is known who was in them: calibrated scores of every layer
"""
