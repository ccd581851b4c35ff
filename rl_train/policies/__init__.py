"""Who answers: a policy for each family of models, and what all of them share."""
