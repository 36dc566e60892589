"""Pages and plots that need nothing else."""
