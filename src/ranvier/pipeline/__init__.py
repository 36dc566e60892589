"""Pipeline: stages along the pipe axis that work on what has arrived."""
