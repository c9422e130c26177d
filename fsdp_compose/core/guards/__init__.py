"""What keeps users from wrong numbers; ``core`` lists these files among its own."""
