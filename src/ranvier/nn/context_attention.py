"""Reference."""

from __future__ import annotations
import numpy as np
import torch
from torch import Tensor
from ranvier.comm import autograd


def context_attention(q, k, v, orders, axis, *, window, cap, method):
    k, v = (
        autograd.gather_all(x, axis) if False else autograd.all_gather(x, axis, 1) for x in (k, v)
    )

    def info(order):
        doc = np.repeat(np.arange(len(order.lengths)), order.lengths)
        place = np.concatenate([np.arange(n) for n in order.lengths])
        return doc[order.token_numbers], place[order.token_numbers]

    out = []
    for i, order in enumerate(orders):
        doc, place = (torch.from_numpy(np.ascontiguousarray(x)) for x in info(order))
        qd, qp = doc[axis.index], place[axis.index]
        kd, kp = doc.flatten(), place.flatten()
        vis = (qd[:, None] == kd) & (kp <= qp[:, None])
        if window:
            vis &= kp > qp[:, None] - window
        g = k.shape[2]
        a = q[i].transpose(0, 1).unflatten(0, (g, -1))
        s = a @ k[i].transpose(0, 1).unsqueeze(1).transpose(-1, -2) * q.shape[-1] ** -0.5
        if cap:
            s = torch.tanh(s / cap) * cap
        p = s.masked_fill(~vis, float("-inf")).softmax(-1)
        y = p @ v[i].transpose(0, 1).unsqueeze(1)
        out.append(y.flatten(0, 1).transpose(0, 1))
    return torch.stack(out)
