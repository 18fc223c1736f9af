"""Text -> instructions: parser, intermediate representation, lane annotations, control flow. Runs nothing."""
