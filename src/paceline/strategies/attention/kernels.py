"""The backward pass of attention in Triton: every sum in one order, so the same bits each time, and nothing added atomically.

One program makes the gradients of a block of keys and values and goes through the queries that saw it; another one makes the
gradient of a block of queries and goes through the keys that it saw. Each computes the probabilities once more from the
logarithm of their sum, which the forward pass left behind.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(base, row, stride, length, width: tl.constexpr, even: tl.constexpr):
    at = base + row[:, None] * stride + tl.arange(0, width)[None, :]
    if even:
        return tl.load(at)
    return tl.load(at, mask=row[:, None] < length, other=0.0)


@triton.jit
def _numbers(base, row, length, other, even: tl.constexpr):
    if even:
        return tl.load(base + row)
    return tl.load(base + row, mask=row < length, other=other)


@triton.jit
def _put_rows(base, row, stride, length, values, width: tl.constexpr, even: tl.constexpr):
    at = base + row[:, None] * stride + tl.arange(0, width)[None, :]
    if even:
        tl.store(at, values.to(base.dtype.element_ty))
    else:
        tl.store(at, values.to(base.dtype.element_ty), mask=row[:, None] < length)


@triton.jit
def dot_kernel(
    out, out_b, out_h, out_s,
    grad, grad_b, grad_h, grad_s,
    dots, heads, length,
    width: tl.constexpr, block: tl.constexpr, even: tl.constexpr,
):  # fmt: skip
    """Compute each row's product of an output and its gradient."""
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0) * block + tl.arange(0, block)
    o = _rows(out + batch * out_b + head * out_h, row, out_s, length, width, even).to(tl.float32)
    g = _rows(grad + batch * grad_b + head * grad_h, row, grad_s, length, width, even).to(tl.float32)
    at = dots + tl.program_id(1).to(tl.int64) * length + row
    if even:
        tl.store(at, tl.sum(o * g, 1))
    else:
        tl.store(at, tl.sum(o * g, 1), mask=row < length)


@triton.jit
def _through_queries(
    d_key, d_value, k, v, key_row, query, query_s, grad, grad_s, sums, dots, begin, end, length, scale,
    width: tl.constexpr, step: tl.constexpr, masked: tl.constexpr, even: tl.constexpr,
):  # fmt: skip
    for start in range(begin, end, step):
        row = start + tl.arange(0, step)
        q = _rows(query, row, query_s, length, width, even)
        # A row past the end has an infinite sum, and so no probabilities.
        logarithm = _numbers(sums, row, length, float("inf"), even) * LOG2_E
        p = tl.exp2(tl.dot(k, tl.trans(q)) * (scale * LOG2_E) - logarithm[None, :])
        if masked:
            p = tl.where(key_row[:, None] <= row[None, :], p, 0.0)
        g = _rows(grad, row, grad_s, length, width, even)
        d_value = tl.dot(p.to(g.dtype), g, d_value)
        dot = _numbers(dots, row, length, 0.0, even)
        ds = p * (tl.dot(v, tl.trans(g)) - dot[None, :])
        d_key = tl.dot(ds.to(q.dtype), q, d_key)
    return d_key, d_value


@triton.jit
def key_value_kernel(
    query, query_b, query_h, query_s,
    key, key_b, key_h, key_s,
    value, value_b, value_h, value_s,
    grad, grad_b, grad_h, grad_s,
    key_grad, key_grad_b, key_grad_h, key_grad_s,
    value_grad, value_grad_b, value_grad_h, value_grad_s,
    sums, dots, heads, length, scale,
    width: tl.constexpr, block: tl.constexpr, step: tl.constexpr, causal: tl.constexpr, even: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys and values."""
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    begin = tl.program_id(0) * block
    row = begin + tl.arange(0, block)
    k = _rows(key + batch * key_b + head * key_h, row, key_s, length, width, even)
    v = _rows(value + batch * value_b + head * value_h, row, value_s, length, width, even)
    query += batch * query_b + head * query_h
    grad += batch * grad_b + head * grad_h
    sums += tl.program_id(1).to(tl.int64) * length
    dots += tl.program_id(1).to(tl.int64) * length
    d_key = tl.zeros([block, width], tl.float32)
    d_value = tl.zeros([block, width], tl.float32)
    free = 0
    if causal:
        free = begin + block  # queries from here on see all of this block
        d_key, d_value = _through_queries(
            d_key, d_value, k, v, row, query, query_s, grad, grad_s, sums, dots, begin, free, length, scale,
            width, step, True, even,
        )  # fmt: skip
    d_key, d_value = _through_queries(
        d_key, d_value, k, v, row, query, query_s, grad, grad_s, sums, dots, free, length, length, scale,
        width, step, False, even,
    )  # fmt: skip
    to_key = key_grad + batch * key_grad_b + head * key_grad_h
    _put_rows(to_key, row, key_grad_s, length, d_key * scale, width, even)
    to_value = value_grad + batch * value_grad_b + head * value_grad_h
    _put_rows(to_value, row, value_grad_s, length, d_value, width, even)


@triton.jit
def _through_keys(
    d_query, q, g, logarithm, dot, query_row, key, key_s, value, value_s, begin, end, length, scale,
    width: tl.constexpr, step: tl.constexpr, masked: tl.constexpr, even: tl.constexpr,
):  # fmt: skip
    for start in range(begin, end, step):
        row = start + tl.arange(0, step)
        k = _rows(key, row, key_s, length, width, even)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * (scale * LOG2_E) - logarithm[:, None])
        if masked:
            p = tl.where(row[None, :] <= query_row[:, None], p, 0.0)
        if not even:
            p = tl.where(row[None, :] < length, p, 0.0)
        v = _rows(value, row, value_s, length, width, even)
        ds = p * (tl.dot(g, tl.trans(v)) - dot[:, None])
        d_query = tl.dot(ds.to(k.dtype), k, d_query)
    return d_query


@triton.jit
def query_kernel(
    query, query_b, query_h, query_s,
    key, key_b, key_h, key_s,
    value, value_b, value_h, value_s,
    grad, grad_b, grad_h, grad_s,
    query_grad, query_grad_b, query_grad_h, query_grad_s,
    sums, dots, heads, length, scale,
    width: tl.constexpr, block: tl.constexpr, step: tl.constexpr, causal: tl.constexpr, even: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of queries."""
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * block  # the longest first
    row = begin + tl.arange(0, block)
    q = _rows(query + batch * query_b + head * query_h, row, query_s, length, width, even)
    g = _rows(grad + batch * grad_b + head * grad_h, row, grad_s, length, width, even)
    place = tl.program_id(1).to(tl.int64) * length
    logarithm = _numbers(sums + place, row, length, float("inf"), even) * LOG2_E
    dot = _numbers(dots + place, row, length, 0.0, even)
    key += batch * key_b + head * key_h
    value += batch * value_b + head * value_h
    d_query = tl.zeros([block, width], tl.float32)
    free = length
    if causal:
        free = begin  # all keys before this are seen by the whole block
    d_query = _through_keys(
        d_query, q, g, logarithm, dot, row, key, key_s, value, value_s, 0, free, length, scale,
        width, step, False, even,
    )  # fmt: skip
    if causal:
        d_query = _through_keys(
            d_query, q, g, logarithm, dot, row, key, key_s, value, value_s, begin, begin + block, length, scale,
            width, step, True, even,
        )  # fmt: skip
    to = query_grad + batch * query_grad_b + head * query_grad_h
    _put_rows(to, row, query_grad_s, length, d_query * scale, width, even)
