"""The HTTP server: a front process with OpenAI's API, and the engine processes behind it.

The front (`app`, `engine_client`) imports neither torch nor a model; an engine process
(`engine_worker`) imports no HTTP library. They exchange `messages` over a Unix socket.
"""
