"""What the command line prints, drawn with rich: colours on a terminal, plain text elsewhere."""
