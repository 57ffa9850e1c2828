"""Ops of recurrent layers (`spec/recurrent.py` has the equations).

A sequence of at most SHORT tokens in the step, such as a decode or a verified run of drafts, is computed token by
token (`tokens.py`). The others are computed in chunks (`chunks.py`). The kernels look at the lengths on the device, so
a captured graph runs with other lengths too. Each of the two kernels skips the other's sequences.
"""
