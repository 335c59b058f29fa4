"""Files that ``torch.load`` reads, as bytes: their zip directory, their pickle, and how they are laid out anew."""
