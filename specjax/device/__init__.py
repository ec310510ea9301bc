"""The device side of an engine: pure array functions, compiled by JAX.

The host plans each step and sends its inputs as packed integer arrays. No value returns to Python
inside a step: only the device knows how many drafts are accepted until the step's results are read.

Shapes are written in these letters. `f32`, `i32`, `u32` and `bool` are dtypes; an array without one
has the model's dtype.

    B   requests in a step, padding included
    S   slots: requests that can be resident
    T   rows of a request in a step: tokens of a chunk; the last token, its drafts and padding
    N   rows in total, B T; the rows of a request are adjacent
    K   drafts of a request
    R   results of a request: K + 1, or 1 at the end of a chunk
    L   tokens of a sequence, max_model_len
    P   entries of a request's page table
    V   tokens of the vocabulary; V_d of a drafter's smaller one
    D   width of the model
    F   width of a feed-forward layer; E is the number of experts
    H   heads of queries, H_kv of keys and values, H_v of recurrent states
    D_h width of a head; D_k and D_v of a recurrent state's keys and values
    C   channels of a convolution over W tokens
"""
