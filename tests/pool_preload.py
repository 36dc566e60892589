"""What every worker needs: imported once, then forked."""

import ranvier.parallel  # noqa: F401
