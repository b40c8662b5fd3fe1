"""Recording what a program does on the GPU, through CUPTI."""
