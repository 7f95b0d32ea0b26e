"""Attention recognised in any graph, one file per idea.

The files share these words. The nodes and values *above* a value are those that it is computed from. A *row* is one
element of a batch, and the *place* of a token is its index in its row. *Content* and *auxiliary* values are defined in
posexport.graphs.attention.dataflow. A value is *fixed* if it is the same on all inputs
(posexport.graphs.attention.probe). *Scores* are the product of queries and keys, and *logits* are the input of the
softmax.
"""
