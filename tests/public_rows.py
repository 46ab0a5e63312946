"""Rows of each public data set with the hub's fields and types, and the expected prompt."""

from typing import Any, NamedTuple


class Sample(NamedTuple):
    """Rows of one config.

    Attributes:
        file: its path in the hub's repository.
        row: includes a field that no prompt needs.
        changes: changed fields that make another row.
        prompt, answer, task, prompt_id: expected results for `row`.
    """

    file: str
    row: dict[str, Any]
    changes: dict[str, Any]
    prompt: str
    answer: str | None
    task: str
    prompt_id: str | None


_SENTENCES = (
    "The harbour was rebuilt after the storm of 1953 with a longer pier and a lighthouse of white stone. ",
    "Merchants had asked for this for decades, since the old basin silted up each winter and ships lay outside. ",
    "Today the fish market stands where the first crane was, and ferries leave for the islands twice a day.",
)
PARAGRAPH = "".join(_SENTENCES)
OTHER = "A recipe for bread needs flour, water, salt and time. " * 5

SAMPLES: dict[str, Sample] = {
    "bigbench": Sample(
        "arithmetic/train-00000-of-00001.parquet",
        {
            "idx": 7,
            "inputs": "What is 3 plus 4?",
            "targets": ["7"],
            "multiple_choice_targets": ["7", "8"],
            "multiple_choice_scores": [1, 0],
        },
        {"idx": 8, "inputs": "What is 3 plus 5?", "targets": ["8"]},
        "What is 3 plus 4?",
        "7",
        "arithmetic",
        "arithmetic/train/7",
    ),
    "mmlu_pro": Sample(
        "data/test-00000-of-00001.parquet",
        {
            "question_id": 70,
            "question": "Which of {these} is prime?",
            "options": ["four", "five", "six"],
            "answer": "B",
            "answer_index": 1,
            "cot_content": "",
            "category": "math",
            "src": "x",
        },
        {"question_id": 71, "question": "Which is even, and larger than nine?"},
        "Question: Which of {these} is prime?\nOptions:\nA. four\nB. five\nC. six\nAnswer:",
        "B",
        "mmlu_pro_math",
        "test/70",
    ),
    "wikitext": Sample(
        "wikitext-103-raw-v1/test-00000-of-00001.parquet",
        {"text": PARAGRAPH},
        {"text": OTHER},
        PARAGRAPH,
        None,
        "wikitext",
        None,
    ),
    "taco": Sample(
        "ALL/test-00000-of-00001.parquet",
        {
            "question": "Sort n numbers, n below 10^5.",
            "solutions": "[]",
            "starter_code": "",
            "difficulty": "EASY",
            "Expected Auxiliary Space": None,
        },
        {"question": "Count the paths from s to t in a graph."},
        "Sort n numbers, n below 10^5.",
        None,
        "taco_EASY",
        None,
    ),
    "lmsys_chat_1m": Sample(
        "data/train-00000-of-00006.parquet",
        {
            "conversation_id": "c1",
            "model": "vicuna-13b",
            "conversation": [
                {"content": "Who wrote Faust?", "role": "user"},
                {"content": "Goethe.", "role": "assistant"},
                {"content": "When?", "role": "user"},
            ],
            "turn": 2,
            "language": "English",
            "redacted": False,
        },
        {
            "conversation_id": "c2",
            "conversation": [{"content": "Name a river of Spain.", "role": "user"}, {"content": "Ebro", "role": "x"}],
        },
        "Who wrote Faust?",
        "Goethe.",
        "lmsys_chat_1m",
        "train/c1",
    ),
    "sharegpt": Sample(
        "ShareGPT_V3_unfiltered_cleaned_split.json",
        {
            "id": "q_0",
            "conversations": [
                {"from": "gpt", "value": "How can I help?"},
                {"from": "human", "value": "Plan a week in Rome."},
                {"from": "gpt", "value": "Gladly."},
            ],
        },
        {"id": "q_1", "conversations": [{"from": "human", "value": "Why is the sky blue?"}]},
        "Plan a week in Rome.",
        None,
        "sharegpt",
        "train/q_0",
    ),
    "squad": Sample(
        "squad_v2/validation-00000-of-00001.parquet",
        {
            "id": "56dd",
            "title": "Harbours",
            "context": PARAGRAPH,
            "question": "When was the storm?",
            "answers": {"text": ["1953", "in 1953"], "answer_start": [38, 35]},
        },
        {"id": "56de", "context": OTHER, "question": "What is needed?"},
        f"Context: {PARAGRAPH}\nQuestion: When was the storm?\nAnswer:",
        "1953",
        "squad",
        "validation/56dd",
    ),
    "orca_math": Sample(
        "data/train-00000-of-00001.parquet",
        {"question": "Tom has 3 hens. How many legs?", "answer": "They have 6 legs."},
        {"question": "A train takes two hours for 90 miles. How fast is it?"},
        "Question: Tom has 3 hens. How many legs?\nAnswer:",
        "They have 6 legs.",
        "orca_math",
        None,
    ),
    "math_500": Sample(
        "test.jsonl",
        {
            "problem": r"Find $\frac{6}{2}$.",
            "solution": r"It is $\boxed{3}$.",
            "answer": "3",
            "subject": "Algebra",
            "level": 1,
            "unique_id": "test/algebra/1.json",
        },
        {"problem": "How many primes are below 20?", "unique_id": "test/algebra/2.json"},
        "Problem: Find $\\frac{6}{2}$.\nSolution:",
        "3",
        "math_500_Algebra",
        "test/test/algebra/1.json",
    ),
    "livecodebench": Sample(
        "test5.jsonl",
        {
            "question_title": "A",
            "question_content": "Print n lines.",
            "platform": "atcoder",
            "question_id": "abc1",
            "starter_code": "",
            "difficulty": "easy",
            "public_test_cases": "[]",
            "private_test_cases": "eJx",
        },
        {"question_content": "Find the shortest cycle through a vertex.", "question_id": "abc2"},
        "Print n lines.\n\nWrite a program that solves this.\n",
        None,
        "livecodebench_easy",
        "test/abc1",
    ),
    "gaokao_bench": Sample(
        "data/2010-2022_Math_I_MCQs.jsonl",
        {
            "year": "2010",
            "category": "新课标",
            "question": "已知集合 A, 则\nA. 0\nB. 1\n",
            "answer": ["D", "C"],
            "analysis": "",
            "index": 0,
            "score": 5,
        },
        {"question": "设函数 f 在区间上连续, 求极值", "index": 1},
        "已知集合 A, 则\nA. 0\nB. 1\n",
        "D, C",
        "2010-2022_Math_I_MCQs",
        None,
    ),
    "wic": Sample(
        "wic/validation-00000-of-00001.parquet",
        {
            "word": "bank",
            "sentence1": "He sat on the bank.",
            "sentence2": "The bank was closed.",
            "start1": 14,
            "start2": 4,
            "end1": 18,
            "end2": 8,
            "idx": 3,
            "label": 0,
        },
        {"word": "go", "sentence1": "Go home now.", "sentence2": "Messages must go through.", "idx": 4, "label": 1},
        "Sentence 1: He sat on the bank.\nSentence 2: The bank was closed.\n"
        'Question: Is the word "bank" used in the same sense in both sentences? Answer yes or no.\nAnswer:',
        "no",
        "wic",
        "validation/3",
    ),
    "boolq": Sample(
        "data/validation-00000-of-00001.parquet",
        {"question": "is there a pier", "answer": True, "passage": PARAGRAPH},
        {"question": "does bread need salt", "passage": OTHER},
        f"Passage: {PARAGRAPH}\nQuestion: is there a pier? Answer yes or no.\nAnswer:",
        "yes",
        "boolq",
        None,
    ),
    "trivia_qa": Sample(
        "rc.nocontext/validation-00000-of-00001.parquet",
        {
            "question": "Who painted Guernica?",
            "question_id": "tc_1",
            "answer": {"aliases": ["Pablo Picasso"], "value": "Picasso"},
            "search_results": {"title": []},
        },
        {"question": "Which sea lies east of Denmark?", "question_id": "tc_2"},
        "Question: Who painted Guernica?\nAnswer:",
        "Picasso",
        "trivia_qa",
        "validation/tc_1",
    ),
    "race": Sample(
        "middle/test-00000-of-00001.parquet",
        {
            "example_id": "middle1.txt",
            "article": PARAGRAPH,
            "answer": "C",
            "question": "What leaves twice a day?",
            "options": ["Trains", "Cranes", "Ferries", "Ships"],
        },
        {"article": OTHER, "question": "What is this?"},
        f"Article: {PARAGRAPH}\nQuestion: What leaves twice a day?\n"
        "A. Trains\nB. Cranes\nC. Ferries\nD. Ships\nAnswer:",
        "C",
        "race",
        None,
    ),
    "gsm8k": Sample(
        "main/test-00000-of-00001.parquet",
        {"question": "Ann has 2 apples and buys 3.", "answer": "2+3=5\n#### 5"},
        {"question": "A box weighs 2 pounds. It triples. How heavy is it?"},
        "Question: Ann has 2 apples and buys 3.\nAnswer:",
        "2+3=5\n#### 5",
        "gsm8k",
        None,
    ),
}
