"""What a run needs and how long it takes, predicted, and the choices that follow."""
