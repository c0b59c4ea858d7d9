"""Parts that translations of all trainers share: shell reader, tables, check of the result."""
