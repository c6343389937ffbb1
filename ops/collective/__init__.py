"""Sums and concatenations over ranks: tensors of one shape on several devices of this process."""
