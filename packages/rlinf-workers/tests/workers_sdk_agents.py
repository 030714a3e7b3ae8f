"""Agents written for SDKs, which know nothing of RLinf but an address and a key."""

QUESTIONS = ("7", "21")


async def openai_sdk(base_url, task, *, session):
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=session.api_key) as client:
        messages = list(task["messages"])
        for question in QUESTIONS:
            answer = await client.chat.completions.create(model="policy", messages=messages, temperature=0.2)
            messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": question}]
    return 1.0


async def anthropic_sdk(base_url, task, *, session):
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=base_url, api_key=session.api_key) as client:
        messages = list(task["messages"])
        for question in QUESTIONS:
            answer = await client.messages.create(model="policy", messages=messages, max_tokens=64)
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": question}]
    return 1.0


async def langgraph(base_url, task, *, session):
    from langchain_openai import ChatOpenAI  # pyright: ignore[reportMissingImports]
    from langgraph.graph import END, START, MessagesState, StateGraph  # pyright: ignore[reportMissingImports]

    model = ChatOpenAI(base_url=base_url, api_key=session.api_key, model="policy")

    async def answer(state):
        return {"messages": [await model.ainvoke(state["messages"])]}

    async def ask(state):
        return {"messages": [{"role": "user", "content": QUESTIONS[0]}]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_node("ask", ask)
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", lambda state: END if len(state["messages"]) > 2 else "ask")
    graph.add_edge("ask", "answer")
    await graph.compile().ainvoke({"messages": task["messages"]})
    return 1.0


def smolagents(base_url, task, *, session):
    from smolagents import ChatMessage, OpenAIServerModel  # pyright: ignore[reportMissingImports]
    from smolagents.models import MessageRole  # pyright: ignore[reportMissingImports]

    model = OpenAIServerModel(model_id="policy", api_base=base_url, api_key=session.api_key)
    messages = [ChatMessage(role=MessageRole.USER, content=one["content"]) for one in task["messages"]]
    for question in QUESTIONS:
        messages.append(model.generate(messages, temperature=0.2))
        messages.append(ChatMessage(role=MessageRole.USER, content=question))
    return 1.0
