"""Where the answer of a completion, and of a dataset's row, stands."""

import pytest

from rlinf_algos.rewards.final_answer import final_answer, reference_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Final Answer: The final answer is $5$. I hope it is correct.", "5"),
        ("Final Answer: The final answer is $x = 1.5$. I hope it is correct.", "x = 1.5"),
        ("The answer is 4.\nFinal Answer: The final answer is $\\frac{1}{2}$. I hope it is 3.", "\\frac{1}{2}"),
    ],
)
def test_minerva(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>\\boxed{1}, or is the answer 3?</think>\n\nIt is\n\\[\n\\boxed{2}\n\\]", "2"),
        ("a template opened it: 7 </think> **2**", "2"),
        ("<think>5</think>", None),
        ("<think>the answer is \\boxed{5}, but", None),
    ],
)
def test_deepseek_r1(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The final answer is: $\\boxed{\\frac{1}{2}}$", "\\frac{1}{2}"),
        ("The final answer is:\n\n\\[ \\boxed{7} \\]", "7"),
        ("The final answer is:\n\n$$\n7.5\n$$", "7.5"),
        ("**The final answer is:**\n\n**7**", "7"),
    ],
)
def test_qwen(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("## Step 1: Count 3\n4 of 5\n\nThe answer is 12 apples.", "12 apples"),
        ("## Step 1: Count\n\n## Answer\n\n$12$", "12"),
        ("### Final Answer\n\nThe total is **7** of 9.", "7 of 9"),
        ("**Answer:** $x^2$", "x^2"),
        ("*Answer*: 5", "5"),
        ("Answer: \\$50", "\\$50"),
        ("The answer is thus 5, because 2 + 3 = 5.", "5"),
        ("The answer is 5. The answer is obviously reasonable.", "5"),
        ("The answer is increasing on (0,1).", "increasing on (0,1)"),
        ("The answer for $x > 1$ is 3.", "3"),
        ("The answer is not 5.", "not 5"),
        ("The answer is As5+.", "As5+"),
        ("The answer is 5. Or 6.", "5. Or 6"),
    ],
)
def test_llama(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("6 * 3 = <<6*3=18>>18\n#### 18", "18"),
        ("#### 18\n####", "18"),
        ("#### **$1,234**", r"\$1,234"),
        ("#### 3. Add both\nThis gives 7.\nThe answer is 8", "8"),
        ("It is $5$.\n#### Conclusion\nThe answer is 6.", "6"),
        ("so\n#### no solution", "no solution"),
    ],
)
def test_gsm8k(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>no</think><answer> 5 </answer>", "5"),
        ("<answer>so \\boxed{6}</answer> and 9", "6"),
        ("<answer>1</answer> no: <answer>The answer is 2.</answer>", "2"),
    ],
)
def test_answer_tag(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1}, then $2$. So \boxed{3}", "3"),
        (r"\boxed{a \boxed{b} c}", r"a \boxed{b} c"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{7} and \framebox{8}", "7, 8"),
        (r"\boxed{1} but \boxed{2", "1"),
        (r"\boxed{4} is too small. The answer is 5.", "5"),
        (r"The answer is 5: \boxed{6}", "6"),
        (r"\boxed{5}. The answer is reasonable.", "5"),
        (r"either $\boxed{1}$ or $\boxed{2}$", "1 or 2"),
        (r"\boxed{5}, or maybe 6.", "5 or 6"),
        (r"\boxed{5} or so it seems", "5"),
        (r"\boxed{\text{the answer is 5}}", r"\text{the answer is 5}"),
        (r"The answer is 5. \boxed{}", "5"),
        (r"\boxed{ }", None),
        (r"our answer is $\boxed 2$.", "2"),
        (r"so $\boxed\frac{1}{2}$", r"\frac{1}{2}"),
        (r"$x=\boxed{1}$ or $x=\boxed{2}$", "1 or 2"),
        (r"\boxed{\boxed{9}}", "9"),
    ],
)
def test_boxes(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 42 ", "42"),
        ("First, $n > 3$.\nThus, $n = 42$.", "n = 42"),
        ("We add 3.\nTherefore the total number of apples is 42.", "42"),
        ("It is $5$ or $9$", "$5$ or $9$"),
        ("First 12.\nThen we get $a$, $b$ and $c$ in the end.", "$a$, $b$ and $c$"),
        ("First $a+b$.\nThen we get 12 in the end.", "12"),
        ("She has $15 left.", r"\$15"),
        ("First 3.\nThen -7.5 of it", "-7.5"),
        ("so\n\\[ x + 1 \\]", "x + 1"),
        ("nothing\nhere", None),
        ("6, not 5", "6"),
        ("The answer is neither 3 nor 4 but 5.", "5"),
        ("Tom has 15 more marbles than Jerry.", "15"),
        ("There were 12 boys and 15 girls, which makes 27 children.", "27 children"),
        ("So she has 3 dollars and 50 cents.", "3 dollars and 50 cents"),
        ('{"answer": 8}', "8"),
        ("The answer is&nbsp;8", "8"),
        (r"Each pays $\boxed{75}$ cents.", "75 cents"),
        (r"\boxed{5} in total", "5"),
        ("There are 8 apples left in the basket.", "8 apples"),
        ("Adding gives 3 + 4 = 8.\nWait: it is 7, since 3 + 4 = 7.", "7"),
        ("It takes 45 minutes, which is 5 minutes less than the 50 minutes of her brother.", "45 minutes"),
        ("The rest cannot be 0, 1 or 2, so it must be 3.", "3"),
        ("After a discount of $20 the jacket costs $60.", r"\$60"),
        ("The trip took 120 minutes. This makes sense, because 2 hours are 120 minutes.", "120 minutes"),
        ("x = 4\n$y = 7$", "x = 4, y = 7"),
        ("So a = 3, b = 4", "a = 3, b = 4"),
        ("<b>Answer:</b> <i>64</i>", "64"),
        ("答案是\uff1a\uff13\uff16。", "36"),
        ("解得 x=2 或 x=-3。", "x=2 or x=-3"),
        ("综上所述\uff0c故选C。", "C"),
        ("甲地到乙地的距离为 240 千米。", "240 km"),
        ("一共需要 18 个苹果。", "18"),
        ("因此\uff0c$a$ 等于 $7$\uff0c而不是 $8$。", "7"),
        ("", None),
    ],
)
def test_texts_without_a_statement(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 5 or 6", "The answer is 5 or 6"),
        ("x=3 and y=4", "x=3 and y=4"),
        (r"so $a = \boxed{2}$, or half of \$4", "2"),
        ("3 + 4 = 7\n#### 7", "7"),
        ("<answer>5</answer>", "5"),
        ("  ", None),
    ],
)
def test_a_reference_is_taken_whole_unless_it_is_marked(text, answer):
    assert reference_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The system of 2 equations is inconsistent, so there is **no solution**.", "no solution"),
        ("Since 4 is even:\nYes, it works.", "Yes"),
        ("First 3.\nThe graph is a hyperbola.", "hyperbola"),
        (r"\boxed{5}. So the answer is odd.", "odd"),
        ("The winner is Anna, and Ben comes second.", "Anna"),
    ],
)
def test_answers_in_words(text, answer):
    assert final_answer(text, in_words=True) == answer
