"""What another program has to be given so that it rotates as a rope does."""
