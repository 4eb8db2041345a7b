"""What Backspot costs and how right it is, measured."""
