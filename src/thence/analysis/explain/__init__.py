"""What an expert would say about a trace in a page: findings with evidence, gains and limits."""
