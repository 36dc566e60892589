"""What every worker needs: imported once, then forked."""

import hf_models  # noqa: F401  (transformers takes seconds)
import ranvier.parallel  # noqa: F401
