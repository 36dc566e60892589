"""Communication: verbs, differentiable pairs on top of them, and work deferred behind compute."""
