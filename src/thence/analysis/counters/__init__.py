"""What the hardware counted, shared among the activities that ran, and the answers that follow from it."""
