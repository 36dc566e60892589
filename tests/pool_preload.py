"""What every worker needs: imported once, then forked."""

import gc

import hf_models  # noqa: F401  (transformers takes seconds)
import ranvier.parallel.parallelize
import ranvier.train.trainer  # noqa: F401

gc.freeze()  # else each run's round of the collector looks at all of this, in all workers
