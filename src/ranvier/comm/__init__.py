"""Communication: collectives, differentiable collectives, point-to-point messages, CUDA streams.

Only comm, grid and launch use torch.distributed. Imports launch, cost and the packages below them.
"""
