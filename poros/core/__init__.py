"""The streaming core: layouts, bytes, modules and tensors; no model name, no file format.

[Note: nouns] A *block* is one decoder layer. Its frozen tensors lie in one byte buffer, the *packed
block*, at the places its *layout* names. A *store* holds all packed blocks. A *slot* is one device
buffer at a fixed address, as large as the largest packed block; the *stream* moves packed blocks
from the store into slots (`prefetch`), hands one to the compute (`acquire`) and takes it back
(`release`). The *schedule* says which block a freed slot takes. A *boundary* is what a block's
forward leaves behind so that its backward can recompute it.

[Note: visit] A block's weights exist on the device only between `acquire` and `release`: a visit.
Forward visits run without a graph; a backward visit recomputes with a graph and differentiates it
before the slot is released. No graph may outlive its visit, because bitsandbytes keeps the packed
weight on `ctx` outside `save_for_backward`: used after a refill, such a graph gives exact losses
and wrong gradients.
"""
