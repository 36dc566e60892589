"""Communication: collectives, their autograd forms, point-to-point messages and CUDA streams.

Only comm, grid and launch use torch.distributed. Imports launch, cost and what is below.
"""
