"""Data: corpora and the order in which a run reads them."""
