"""All-reduce and all-gather over ranks: tensors of one shape on several devices of this process."""
